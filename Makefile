# Two commands: `make quickstart` and `make test`. Both create .venv and install what they need first.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= auto
PRESET ?= tiny

.PHONY: help setup setup-dev quickstart test lint types unit test-gpu docs sbom lowest format clean

help:
	@echo "make quickstart   install, train a small ladder of three arms, write quickstart/report.html"
	@echo "                  (PRESET=mini on a GPU; DRY_RUN=1 GPU=h200: what it costs there)"
	@echo "make test         install, then lint, type-check and run the tests (WORKERS=4: four processes)"
	@echo "make test-gpu     the tests that use a GPU, with the Python that has torch there (PYTHON=python3)"
	@echo "make docs         install, then build the documentation site in site/ (readable without a network)"
	@echo "make lowest       test the lowest versions of the libraries that pyproject.toml allows"
	@echo "make sbom         write sbom.cdx.json, what is installed and its licences"
	@echo "make format       fix lint errors and format the code"
	@echo "make clean        remove the environment and the caches"

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

# The stamp files make a second install a no-op. constraints.txt pins every version; the requirements have the
# hashes of those files (tools/hash_pins.py), all but torch's, whose build is the one that pip's index offers.
PIP = -m pip install --quiet --disable-pip-version-check
HASHED = $(BIN)/python $(PIP) --no-deps --only-binary :all: --require-hashes -r
define INSTALL_STEEPEN
	$(BIN)/python $(PIP) -c constraints.txt torch
	$(BIN)/python $(PIP) --no-deps --no-build-isolation -e .
endef

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "steepen needs Python 3.11 or newer; this is %d.%d (choose one with PYTHON=...)" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt requirements.txt | $(BIN)/python
	$(HASHED) requirements.txt
	$(INSTALL_STEEPEN)
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt requirements.txt requirements-dev.txt | $(BIN)/python
	$(HASHED) requirements-dev.txt
	$(INSTALL_STEEPEN)
	@touch $@ $(VENV)/.ready

# A ladder of three arms on the built-in corpus and its page; the paper's verdicts and this ladder's own.
quickstart: setup
	$(BIN)/python tools/quickstart.py $(PRESET) $(if $(DRY_RUN),--dry-run $(if $(GPU),--gpu $(GPU)))

# Types beside the tests: they keep one core busy for half a minute.
test: setup-dev lint
	$(MAKE) --jobs=2 types unit

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/basedpyright

# A worker begins with half of the tests, in their order, so that what tests of a package share is made once.
unit: setup-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# On a GPU machine, with what is installed there: as many processes as cores, on one GPU.
test-gpu:
	$(PYTHON) tools/test_on_gpu.py

# Broken links, missing pages and unknown names in the reference are errors.
docs: setup-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "site/index.html: open it in any browser."

# What is installed, as a bill of materials (CycloneDX).
sbom: setup
	$(BIN)/python tools/sbom.py > sbom.cdx.json

# The lowest versions that pyproject.toml allows, in an environment of their own (TORCH=2.13.0: with that torch).
LOWEST = tests/test_command_line.py tests/requests tests/results tests/utils tests/runs tests/data tests/laws/test_tables.py \
	tests/laws/test_verdicts.py tests/laws/test_fit_and_power_commands.py tests/report/test_report_page.py \
	tests/report/test_report_figures.py tests/training/test_trainer.py tests/training/test_checkpoint_resume.py \
	tests/inference/test_generate.py tests/inference/test_import_published.py tests/studies/test_ladders.py
lowest:
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python tools/lowest_versions.py $(if $(TORCH),--torch $(TORCH)) > $(VENV)-lowest/lowest.txt
	$(VENV)-lowest/bin/python $(PIP) -r $(VENV)-lowest/lowest.txt pytest pytest-xdist hypothesis
	$(VENV)-lowest/bin/python $(PIP) --no-deps -e .
	$(VENV)-lowest/bin/python -m pytest -n $(WORKERS) $(LOWEST)

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-lowest .pytest_cache .ruff_cache .hypothesis build site src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
