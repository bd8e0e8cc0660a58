# Two commands on a fresh machine: `make run` trains the example, `make test` checks and tests the project.
PYTHON ?= $(shell scripts/python)
VENV   ?= .venv
BIN     = $(VENV)/bin

.PHONY: help run test test-all setup setup-dev check e2e alerts unit generate format bench mutants clean

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

run: setup       ## install, then train examples/01-text on this machine
	$(BIN)/diloco run examples/01-text/job.yaml

test: setup-dev  ## install, then format, lint, types, contracts, generated files, and all tests but the slow tier
	VENV=$(VENV) scripts/check

test-all: setup-dev  ## `make test` with the slow tier (docs/testing.md)
	VENV=$(VENV) scripts/check --all

setup: $(VENV)/.local-installed       ## the programs in .venv
setup-dev: $(VENV)/.dev-installed     ## the programs and the development tools in .venv

# uv shares torch's gigabytes between environments; pip alone works as well.
$(VENV)/bin/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv

$(VENV)/.local-installed: pyproject.toml | $(VENV)/bin/uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -e '.[local]'
	touch $@

$(VENV)/.dev-installed: pyproject.toml | $(VENV)/bin/uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -e '.[dev]'
	touch $@ $(VENV)/.local-installed

check:           ## the checks of `make test`, and the unit tests that start no processes: about a minute
	VENV=$(VENV) scripts/check --fast

e2e: setup-dev   ## the tests on Kubernetes clusters alone (tests/e2e/README.md)
	DILOCO_E2E=required $(BIN)/python -m pytest -ra --durations=15 tests/e2e

alerts:          ## the chart's alerts against samples, with promtool (fetched with apt where it is missing)
	scripts/alerts

format:          ## format, and apply the fixes of the linter
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate:        ## stubs and every other generated file
	$(BIN)/python scripts/generate.py

bench:           ## all benchmarks; results go to benchmarks/results
	missed=0; for b in benchmarks/bench_*.py; do $(BIN)/python $$b || missed=1; done; exit $$missed

mutants: setup-dev  ## a random sample of mutants of the pure cores against the unit tests (SEED=0 COUNT=150)
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[mutants]'
	nice $(BIN)/python scripts/mutants.py --seed $(or $(SEED),0) --count $(or $(COUNT),150)

clean:           ## remove the environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
