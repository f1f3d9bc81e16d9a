"""In a real headless browser: notebooks as JupyterLab shows them and the report page, on a phone and on a desk."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from notebook_runs import FOLDER, NAMES, executed, need

pytestmark = pytest.mark.slow

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
LIVE = ("01_capacity_planning", "02_which_method_fits")
"""Notebooks with controls: run in the browser, with a kernel of their own."""
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 900}

# Colours in a picture: an empty one has one or two.
COLOURS = """image => { const c = document.createElement('canvas'); c.width = image.naturalWidth;
c.height = image.naturalHeight; const d = c.getContext('2d'); d.drawImage(image, 0, 0);
const p = d.getImageData(0, 0, c.width, c.height).data; const seen = new Set();
for (let i = 0; i < p.length; i += 4) seen.add((p[i] << 16) | (p[i + 1] << 8) | p[i + 2]); return seen.size; }"""

LETTERS = "svg => 10 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width"


def chromium():
    found = next((w for w in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if w), None)
    if found is None:
        pytest.skip("no chromium here: apt-get install chromium")
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    sync = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
    with sync.sync_playwright() as driver:
        folder = str(tmp_path_factory.mktemp("profile"))
        held = driver.chromium.launch_persistent_context(
            folder, executable_path=chromium(), args=list(FLAGS), viewport=DESK, offline=False
        )
        yield held
        held.close()


@pytest.fixture
def tab(browser):
    page = browser.new_page()
    page.set_viewport_size(DESK)
    page.complaints = []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    yield page
    page.close()


# -- the report page -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("report") / "answer.html"
    ask = ("report", "--model", "llama-3.1-8b", "--device", "rtx-4090", "--prompt", "128k", "--out", str(out))
    subprocess.run([sys.executable, "-m", "kvsim", *ask], check=True, capture_output=True)
    return out


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_the_report_is_readable(tab, report, size):
    loaded = []
    tab.on("request", lambda request: loaded.append(request.url))
    tab.set_viewport_size(size)
    tab.goto(report.as_uri())
    assert loaded == [report.as_uri()], "the page must load nothing but itself"
    assert tab.evaluate("document.documentElement.scrollWidth") <= size["width"], "the page must not scroll sideways"
    assert float(tab.evaluate("parseFloat(getComputedStyle(document.querySelector('p')).fontSize)")) >= 14
    pictures = [p for p in tab.query_selector_all("figure svg") if p.is_visible()]
    assert len(pictures) == 6
    assert min(p.evaluate(LETTERS) for p in pictures) >= 12, "letters of ten points, in pixels of this screen"
    for picture in pictures:
        picture.scroll_into_view_if_needed()
        box = picture.bounding_box()
        assert box["width"] >= 0.85 * min(size["width"], 340)
        assert 0.4 * box["width"] < box["height"] < 0.9 * size["height"], "a picture fits on one screen"
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size["width"]
        assert len(picture.screenshot()) > 5_000  # an empty rectangle compresses to less
    tab.click("figure details summary")
    assert tab.is_visible("figure details table")
    assert not tab.complaints


def test_the_report_prints(tab, report):
    tab.goto(report.as_uri())
    tab.set_viewport_size({"width": 720, "height": 1000})  # A4 less its margins
    tab.emulate_media(media="print")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 720
    assert not tab.is_visible("details")
    assert len(tab.pdf(format="A4")) > 50_000


# -- notebooks in JupyterLab -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab over copies of the notebooks, at (address, folder)."""
    pytest.importorskip("jupyterlab", reason="notebooks need the extra: pip install 'kvsim[notebooks]'")
    home = tmp_path_factory.mktemp("lab")
    folder = home / "notebooks"
    folder.mkdir()
    (home / "tests").symlink_to(FOLDER.parent / "tests")
    settings = home / "settings"
    for name, values in {
        "notebook-extension/tracker": {"windowingMode": "none"},  # else cells out of sight are not drawn
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }.items():
        file = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(settings), "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
                   "JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
                   "IPYTHONDIR": str(home / "ipython")}  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1",
               f"--ServerApp.root_dir={home}", "--IdentityProvider.token=", "--ServerApp.port_retries=0"]  # fmt: skip
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=home)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(address + "/api", server, home / "log")
        yield address, folder
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(url, server, log):
    for _ in range(240):
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(url, timeout=2).read()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"JupyterLab did not come up: {log.read_text()[-2000:]}")


def _open(tab, lab, name):
    address, _ = lab
    tab.goto(f"{address}/lab/tree/notebooks/{name}.ipynb?reset", timeout=120_000)
    tab.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=120_000)


PROMPTS = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.innerText.trim())"


def _run_all(tab, lab, name):
    """Every cell run: a request may be lost while the page still connects to its kernel, so load and ask again."""
    for _ in range(4):
        _open(tab, lab, name)
        tab.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=120_000, state="attached")
        tab.click("text=Run >> nth=0")
        tab.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            prompts = tab.evaluate(PROMPTS)
            if prompts and all(re.fullmatch(r"\[\d+\]:", p) for p in prompts):
                return
            tab.wait_for_timeout(500)
        tab.keyboard.press("Escape")  # a question whether to overwrite what autosave wrote
    raise AssertionError(f"cells that did not run: {prompts}")


def _check_outputs(tab, name, expected):
    """Nothing went wrong in any output, and pictures are what they should be: drawn, loaded, not empty."""
    assert tab.query_selector_all('.jp-RenderedText[data-mime-type="application/vnd.jupyter.error"]') == []
    errors = [e.inner_text() for e in tab.query_selector_all(".jp-RenderedText[data-mime-type*=stderr]")]
    assert not re.search("Warning|Error", "".join(errors)), errors
    pictures = tab.query_selector_all(".jp-OutputArea img")
    assert len(pictures) >= expected, f"{name}: {len(pictures)} pictures of {expected}"
    for picture in pictures:
        assert picture.evaluate("i => i.complete && i.naturalWidth > 300 && i.naturalHeight > 150")
        assert picture.evaluate(COLOURS) > 20, f"{name}: an empty picture"
        assert picture.bounding_box()["width"] <= tab.query_selector(".jp-Notebook").bounding_box()["width"]
    assert not tab.complaints


@pytest.mark.parametrize("name", [n for n in NAMES if n not in LIVE])
def test_executed_notebooks_render(tab, lab, name):
    import nbformat

    need(name)
    held = executed(name)
    nbformat.write(held, lab[1] / f"{name}.ipynb")
    drawn = sum("image/png" in o.get("data", {}) for c in held.cells if c.cell_type == "code" for o in c.outputs)
    tables = sum("<table" in o.get("data", {}).get("text/html", "")
                 for c in held.cells if c.cell_type == "code" for o in c.outputs)  # fmt: skip
    _open(tab, lab, name)
    tab.wait_for_function(f"document.querySelectorAll('.jp-OutputArea table').length >= {tables}", timeout=60_000)
    _check_outputs(tab, name, drawn)
    assert len(tab.query_selector_all(".jp-MarkdownCell h1, .jp-MarkdownCell h2")) >= 3
    tab.screenshot(path=str(lab[1] / f"{name}.png"))


@pytest.mark.parametrize("name", LIVE)
def test_live_notebooks_run_and_their_controls_respond(tab, lab, name):
    need(name)
    shutil.copy(FOLDER / f"{name}.ipynb", lab[1])
    _run_all(tab, lab, name)
    sources = [c for c in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    drawn = sum("plt.show()" in "".join(c["source"]) for c in sources)
    tab.wait_for_selector(".jupyter-widgets select", timeout=120_000)
    tab.wait_for_selector(".jupyter-widgets img", timeout=120_000)
    _check_outputs(tab, name, drawn + 1)
    before = tab.get_attribute(".jupyter-widgets img", "src")
    select = tab.query_selector(".jupyter-widgets select")
    options = [o.inner_text() for o in select.query_selector_all("option")]
    select.select_option(label=options[1])
    changed = "old => { const i = document.querySelector('.jupyter-widgets img'); return i && i.src !== old; }"
    tab.wait_for_function(changed, arg=before, timeout=120_000)
    assert tab.query_selector(".jupyter-widgets img").evaluate(COLOURS) > 20
    assert not tab.complaints


def test_this_file_names_notebooks_that_exist():
    assert set(LIVE) <= set(NAMES)
    assert Path(FOLDER).is_dir()
