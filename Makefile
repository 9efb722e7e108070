# make setup | demo | test | test-full | lint | wheel | clean
# `make demo ARGS="--data-path DIR"` trains on the full MNIST files; `make demo ARGS=--download` fetches them first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: setup demo test test-full lint wheel clean

setup: $(VENV)/.ready

# Everything pinned: requirements.lock holds exact versions, torch first, on its own, so that nothing pulls another one.
$(VENV)/.ready: requirements.lock pyproject.toml scripts/prerequisites.sh
	@PYTHON=$(PYTHON) sh scripts/prerequisites.sh
	@echo "making $(VENV) (torch and the rest: a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	@$(BIN)/pip install -q --disable-pip-version-check -r requirements.lock
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup
	@$(BIN)/python apps/demo.py $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: lint
	@$(BIN)/python -m pytest -n 2 $(ARGS)

test-full: lint
	@$(BIN)/python scripts/test_full.py $(ARGS)

wheel: setup
	@$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf $(VENV) build dist out src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
