"""The CPU kernels' library: compiled at first use, kept, and called through plain C; it knows no store."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from kvsim.errors import KvsimError, did_you_mean

SOURCES = Path(__file__).parent / "csrc"
MODES = ("auto", "eager", "triton")
SECONDS = 25
"""About how long compiling takes; said while one waits."""


class Library:
    """The compiled kernels. `level`: 0 ATen's vectors, 1 with AVX-512, 2 with integer dot products."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.attend = self.library.kvsim_attend
        self.attend.argtypes, self.attend.restype = [ctypes.c_void_p], None
        self.encode = self.library.kvsim_encode
        self.encode.argtypes, self.encode.restype = [ctypes.c_void_p], ctypes.c_int
        self.multiply = self.library.kvsim_multiply
        self.multiply.argtypes, self.multiply.restype = [ctypes.c_int64], ctypes.c_float
        self.level = int(self.library.kvsim_level())
        self.lanes = int(self.library.kvsim_lanes())

    @property
    def dots(self) -> bool:
        """Whether codes are multiplied as integers."""
        return self.level == 2


def switch() -> str:
    """KVSIM_KERNELS: auto (the default), eager, or triton: Triton's kernels on the CPU too, interpreted."""
    mode = os.environ.get("KVSIM_KERNELS", "") or MODES[0]
    if mode not in MODES:
        raise KvsimError(f"KVSIM_KERNELS={mode} is none of {', '.join(MODES)}{did_you_mean(mode, MODES)}")
    return mode


@cache
def library() -> Library | str:
    """The library, compiled where it is not yet; or why there is none, said once on stderr."""
    compiler = os.environ.get("CXX", "c++")
    missing = [tool for tool in (compiler, "ninja") if shutil.which(tool, path=_search_path()) is None]
    if missing:
        return _without(f"{' and '.join(missing)} not found")
    try:
        return Library(_built(compiler))
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return _without(next((line for line in lines if "error:" in line), lines[-1]).strip())


def _without(why: str) -> str:
    print(f"kvsim: no CPU kernels ({why}); attention over packed rows runs eagerly, which is slower", file=sys.stderr)
    return why


def _built(compiler: str) -> Path:
    """The shared library's path. Its name carries what it was made of and for, so that a shared home holds several."""
    from torch.utils import cpp_extension

    name = f"kvsim_cpu_{_fingerprint(compiler)}"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    path = root / f"{name}.so"
    if path.exists():
        return path
    print(f"kvsim: compiling the CPU kernels once (about {SECONDS} s)", file=sys.stderr, flush=True)
    root.mkdir(parents=True, exist_ok=True)
    # built aside and moved when complete: another process sees all of it or nothing
    with tempfile.TemporaryDirectory(dir=root) as folder, contextlib.redirect_stdout(io.StringIO()), _searching():
        cpp_extension.load(
            name,
            [str(SOURCES / source) for source in ("attend.cpp", "encode.cpp")],
            extra_cflags=["-O3", "-fopenmp", *machine_flags()],
            extra_ldflags=["-fopenmp"],
            build_directory=folder,
            is_python_module=False,
        )
        os.replace(Path(folder) / path.name, path)
    return path


def _search_path() -> str:
    """Where programs are looked for: also beside this Python, where a virtual environment keeps ninja."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


@contextlib.contextmanager
def _searching() -> Iterator[None]:
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = _search_path()
    try:
        yield
    finally:
        os.environ["PATH"] = before


def machine_flags() -> list[str]:
    """What makes the compiler use all of this processor's vectors."""
    return ["-mcpu=native"] if platform.machine() in ("aarch64", "arm64") else ["-march=native"]


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    for fact in (torch.__version__, compiler, *machine_flags(), _processor()):
        digest.update(fact.encode())
    return digest.hexdigest()[:12]


def _processor() -> str:
    """What the processor can do: a library built for one must not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
