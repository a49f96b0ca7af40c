# Every target works on a fresh clone: the first one called creates .venv and installs into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help train test test-all check format clean
help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/train.stamp: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[elpv]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(VENV)/train.stamp $@

train: $(VENV)/train.stamp  ## train the default configuration, evaluate it at sizes it never saw
	$(BIN)/python train.py --config configs/default.yaml

test: $(VENV)/dev.stamp  ## run the tests (about 6 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/dev.stamp  ## run the slow tests too
	$(BIN)/python -m pytest -n 2

check: $(VENV)/dev.stamp  ## format, lint, types and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/nbstripout --verify notebooks/*.ipynb
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not integration"

format: $(VENV)/dev.stamp  ## format the code and strip the notebooks
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/nbstripout notebooks/*.ipynb

clean:  ## remove the environment and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
