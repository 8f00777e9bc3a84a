# Two commands do all the set-up on a fresh machine (Python >= 3.11, make, git): `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where torch was built for CUDA, tests and demo still run on the CPU; several processes share the cores.
export OMP_NUM_THREADS ?= 1

# Our sources are compiled once, and not by each of the processes that the tests start, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

# Each worker has a federation of its own. For "auto" see tests/conftest.py.
PYTEST_PARALLEL ?= --numprocesses auto --maxprocesses 4

.PHONY: demo test check docs install clean

demo: $(VENV)/.installed
	$(BIN)/vfl demo

test: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python scripts/check
	$(BIN)/pytest $(PYTEST_PARALLEL)

check: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python scripts/check

docs: $(VENV)/.installed-dev  ## build the site of the documentation, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

install: $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'error: Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# editable_mode=compat: a plain path, which mypy and editors can follow too; setuptools' own hook they cannot.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo 'installing (torch is large: this takes a minute or more the first time)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo 'installing with development tools (torch is large: this takes a minute or more the first time)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info
