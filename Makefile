# make setup | demo | test | test-slow | test-gpu-code | test-full | coverage | bench | bench-smoke | docs | lint | wheel | clean
# `make demo ARGS="--data-path DIR"` trains on the full MNIST files; `make demo ARGS=--download` fetches them first.
# `make bench ARGS="--rows lenet-1 --rounds 5"` measures some rows; bench/README.md has the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
FRONTENDS := $(patsubst %/pyproject.toml,./%,$(wildcard frontends/*/pyproject.toml))

.PHONY: setup demo test test-slow test-gpu-code test-full coverage bench bench-smoke docs lint wheel clean

setup: $(VENV)/.ready

# Everything pinned: requirements.lock holds exact versions, torch first, on its own, so that nothing pulls another one.
$(VENV)/.ready: requirements.lock pyproject.toml $(FRONTENDS:%=%/pyproject.toml) scripts/prerequisites.sh
	@PYTHON=$(PYTHON) sh scripts/prerequisites.sh
	@echo "making $(VENV) (torch and the rest: a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	@$(BIN)/pip install -q --disable-pip-version-check -r requirements.lock
	@for place in . $(FRONTENDS); do \
	  $(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e $$place || exit 1; done
	@touch $@

demo: setup
	@$(BIN)/python apps/demo.py $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: lint
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

# The other half of the time: whole programs, public models, generated programs, faults. CI runs both.
test-slow: setup
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m slow $(ARGS)

# What is generated for GPUs, run thread by thread on the host: needs Triton, and no GPU.
$(VENV)/.gpu-ready: $(VENV)/.ready requirements-gpu.lock
	@echo "installing what compiles for GPUs"
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade --target $(VENV)/gpu -r requirements-gpu.lock
	@touch $@

test-gpu-code: $(VENV)/.gpu-ready
	@PYTHONPATH=$(VENV)/gpu $(BIN)/python -m pytest tests/gpu -n 2 $(ARGS)

test-full: lint
	@$(BIN)/python scripts/test_full.py $(ARGS)

# Models of public libraries compared with eager PyTorch; the table goes into docs/coverage.md. The libraries are installed when they are
# first needed, without what they depend on: some of them would bring another torch.
$(VENV)/.coverage-ready: $(VENV)/.ready requirements-coverage.lock
	@echo "installing the libraries whose models are tried"
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps -r requirements-coverage.lock
	@touch $@

coverage: $(VENV)/.coverage-ready
	@$(BIN)/python tests/coverage/run.py --out docs/coverage.md $(ARGS)

# JAX is a peer in the benchmark and nothing else: installed when it is first needed.
$(VENV)/.bench-ready: $(VENV)/.ready requirements-bench.lock
	@echo "installing the benchmark's peers"
	@$(BIN)/pip install -q --disable-pip-version-check -r requirements-bench.lock
	@touch $@

bench: $(VENV)/.bench-ready
	@$(BIN)/python -m bench $(ARGS)

bench-smoke: $(VENV)/.bench-ready
	@$(BIN)/python -m bench --smoke $(ARGS)

# The site, in out/site: every link, anchor and picture checked, nothing fetched from other hosts by whoever reads it.
$(VENV)/.docs-ready: $(VENV)/.ready requirements-docs.lock
	@echo "installing what builds the documentation"
	@$(BIN)/pip install -q --disable-pip-version-check -r requirements-docs.lock
	@touch $@

docs: $(VENV)/.docs-ready
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@$(BIN)/python scripts/check_site.py out/site

wheel: setup
	@for place in . $(FRONTENDS); do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$place || exit 1; done

clean:
	rm -rf $(VENV) build dist out src/*.egg-info frontends/*/build frontends/*/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
