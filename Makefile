# `make help` lists the targets. PYTHON=, PIP_ARGS= and PYTEST_ARGS= can be given on the command line.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3.11
PIP_ARGS ?=
PYTEST_ARGS ?=
N ?= 50
DO ?= up

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help setup demo test lint soak simulate cluster bench docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | awk -F'\t' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv and install everything, once

$(STAMP): core/pyproject.toml trainer/pyproject.toml operator/pyproject.toml constraints.txt requirements-dev.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found; name a Python 3.11 with PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(PIP_ARGS) $(TORCH) -c constraints.txt
	$(PIP) install -q $(PIP_ARGS) -e core -e trainer -e operator -r requirements-dev.txt -c constraints.txt
	@touch $@

demo: $(STAMP) ## train on this machine, lose two workers on the way, compare with an undisturbed run
	$(BIN)/bamboo run examples/quickstart.yaml --preempt at:15:2 --preempt at:35:1:notice --verify

test: lint ## lint, then the tests that are neither slow nor soak
	$(BIN)/python -m pytest -q -m "not slow and not soak" $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=bench $(BIN)/mypy bench/*.py
	$(BIN)/lint-imports

soak: $(STAMP) ## random faults, N=50 rounds
	BAMBOO_SOAK=$(N) $(BIN)/python -m pytest -m soak --timeout=0 $(PYTEST_ARGS)

simulate: $(STAMP) ## the protocol under random faults in virtual time, N=50 times 100 seeds of each kind
	for kind in "" --elastic --restarts; do $(BIN)/python tests/simulate.py --seeds 0:$(N)00 $$kind; done

cluster: $(STAMP) ## start a Kubernetes with fake nodes to play with; DO=status and DO=down
	PYTHONPATH=tests $(BIN)/python -m cluster $(DO)

bench: ## list the benchmarks
	@found=$$(find bench -name '*.py' ! -name '_*' 2>/dev/null | sort); \
	if [ -z "$$found" ]; then echo "there are no benchmarks yet"; \
	else for f in $$found; do echo "$(BIN)/python $$f"; done; fi

docs: $(STAMP) ## write docs/api.md anew from the CRD
	$(BIN)/python docs/generate_api.py

clean: ## remove caches and build outputs (.venv stays)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find core trainer operator tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
