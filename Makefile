# Two commands do all the set-up on a fresh machine (Python >= 3.11, make, git): `make demo` and `make test`.
# `make help` says what each target does: it prints the words behind ## below.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where torch was built for CUDA, tests and demo still run on the CPU; several processes share the cores.
export OMP_NUM_THREADS ?= 1

# Our sources are compiled once, and not by each of the processes that the tests start, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

# Each worker has a federation of its own. For "auto" see tests/conftest.py.
PYTEST_PARALLEL ?= --numprocesses auto --maxprocesses 4
# CI loads a plug-in here, which records the tests that failed: see scripts/ci_tests.py.
PYTEST_REPORT ?=

.PHONY: demo test test-all unit check docs coverage format install dev lock release clean help

demo: $(VENV)/.installed  ## train a federation of five processes on this machine (about 10 s)
	$(BIN)/vfl demo

# Tests of satellites, documents and deployment files run here if what they test changed: see tests/core.py.
test: $(VENV)/.installed-dev  ## run the checks, then the tests of the core
	PYTHON=$(BIN)/python scripts/check
	$(BIN)/pytest $(PYTEST_PARALLEL) --core

test-all: $(VENV)/.installed-dev  ## run the checks, then every test, as CI does
	PYTHON=$(BIN)/python scripts/check
	$(BIN)/pytest $(PYTEST_PARALLEL) $(PYTEST_REPORT)

unit: $(VENV)/.installed-dev  ## run the quick tests of units of the core, which start no run and no program
	$(BIN)/pytest --numprocesses logical --maxprocesses 4 --core -m 'not slow' tests/unit

check: $(VENV)/.installed-dev  ## check style, types, layers and generated code; no test runs
	PYTHON=$(BIN)/python scripts/check

docs: $(VENV)/.installed-dev  ## build the site of the documentation, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Lines that run in other processes are not counted. The floor is fail_under in pyproject.toml.
coverage: $(VENV)/.installed-dev  ## count the lines that tests reach in their own process
	$(BIN)/pytest $(PYTEST_PARALLEL) --cov tests/unit tests/contract tests/integration

format: $(VENV)/.installed-dev  ## format the code, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(VENV)/.installed  ## install the programs into .venv

dev: $(VENV)/.installed-dev  ## install the programs and the tools of development into .venv

lock: $(VENV)/.installed-dev  ## renew deploy/locks; UPGRADE=1 takes the newest versions
	$(BIN)/python scripts/lock $(if $(UPGRADE),--upgrade)

release: $(VENV)/.installed-dev  ## make a release: VERSION=0.2.0; DRY_RUN=1 shows it and keeps nothing
	$(BIN)/python scripts/release $(VERSION) $(if $(DRY_RUN),--dry-run)

help:  ## say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

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
	@# The engine of rows.psi.engine = "rr22", without what it does not use. It has no wheel for CPython 3.12.
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' && \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps spu==0.9.5 || \
	  echo 'note: tests of rr22 are skipped: the wheel spu 0.9.5 is not to be had here'
	@touch $@ $(VENV)/.installed

clean:  ## remove .venv and what was built
	rm -rf $(VENV) build dist *.egg-info
