# Two commands: `make quickstart` and `make test`. Both create .venv and install what they need first.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= auto
PRESET ?= tiny

.PHONY: help setup setup-dev quickstart test lint types unit docs format clean

help:
	@echo "make quickstart   install, train a small ladder of three arms, write quickstart/report.html"
	@echo "                  (PRESET=mini on a GPU)"
	@echo "make test         install, then lint, type-check and run the tests (WORKERS=4: four processes)"
	@echo "make docs         install, then build the documentation site in site/ (readable without a network)"
	@echo "make format       fix lint errors and format the code"
	@echo "make clean        remove the environment and the caches"

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

# The stamp files make a second install a no-op; constraints.txt pins the versions that CI installs.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "steepen needs Python 3.11 or newer; this is %d.%d (choose one with PYTHON=...)" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) .
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev]'
	@touch $@ $(VENV)/.ready

# A ladder of three arms on the built-in corpus and its page; the paper's verdicts and this ladder's own.
quickstart: setup
	$(BIN)/python tools/quickstart.py $(PRESET)

test: setup-dev lint types unit

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/basedpyright

unit: setup-dev
	$(BIN)/python -m pytest -n $(WORKERS)

# Broken links, missing pages and unknown names in the reference are errors.
docs: setup-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "site/index.html: open it in any browser."

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build site src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
