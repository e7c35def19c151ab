# `make demo` and `make test` need Python 3.11+ with pip and nothing else: the first call builds
# .venv from the pinned requirements, later calls find it ready.

PYTHON  ?= python3#     builds .venv
PY      ?= python3#     runs the gpu-* targets as it is: nothing is installed for them
VENV    ?= .venv
ARGS    ?=#             more arguments for pytest or the benchmark, e.g. ARGS="-k norm"
ONLY    ?=#             benchmark only what this names
RESULTS ?=#             where measurements go; bench/results when empty

# What was imported once is not compiled again by the next of the many processes of the tests.
export PYTHONDONTWRITEBYTECODE =

BIN   := $(VENV)/bin
DEPS  := $(VENV)/.deps-stamp
READY := $(VENV)/.ready-stamp
# Not compiled by pip, which has one core for it: the large ones below, the rest as it is imported.
SITE  := $(VENV)/lib/python3*/site-packages
LARGE := torch sympy numpy networkx triton mpmath hypothesis _pytest
UNUSED := tests|testing/_internal|physics|stats|vector|distutils|f2py
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

BENCH_ARGS = $(if $(ONLY),--only $(ONLY)) --out $(or $(RESULTS),bench/results) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench gpu-test gpu-bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-12s %s\n", $$1, $$2}'

demo: $(READY)  ## a short tour: optimise a model, run it, explain the plan
	$(BIN)/deuteron demo

test: $(READY)  ## run the tests, in a few minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not sweep" $(ARGS)

test-all: $(READY)  ## run the long sweeps as well
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(READY)  ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## measure on the CPU (ONLY=name, RESULTS=folder)
	$(BIN)/python -m bench.run --device cpu $(BENCH_ARGS)

gpu-test:  ## run the GPU tests with PY as it is, no installs (ARGS="-m gpu" for the sweeps as well)
	PYTHONPATH=. $(PY) -m pytest -m "gpu and not sweep" $(ARGS)

gpu-bench:  ## measure on the GPU with PY as it is (ONLY=name, RESULTS=folder)
	PYTHONPATH=. $(PY) -m bench.run --device cuda $(BENCH_ARGS)

clean:  ## remove caches and build output; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv that was left half-built is completed, not refused.
$(DEPS): requirements.txt requirements-dev.txt requirements-triton.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Deuteron needs Python 3.11 or newer: make PYTHON=python3.11")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned requirements into $(VENV) (once)"
	@# meanwhile, the other core compiles what is here already
	@$(PYTHON) -m compileall -q deuteron bench & $(PIP) -r requirements-dev.txt && wait
	@$(PIP) --no-deps -r requirements-triton.txt
	@# by all cores now, not by each process that imports it; files for newer Pythons fail, and do not matter
	@$(BIN)/python -m compileall -q -j 0 -x '/($(UNUSED))/' $(addprefix $(SITE)/,$(LARGE)) >/dev/null || true
	@touch $@

$(READY): $(DEPS) pyproject.toml
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@
