# `make help` lists the targets. PYTHON=, PIP_ARGS=, TORCH_ARGS= and PYTEST_ARGS= can be given on the command line.
# TORCH_ARGS are pip's options for torch alone; docs/images.md says how to get its build for CPUs with them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3.11
PIP_ARGS ?=
TORCH_ARGS ?=
PYTEST_ARGS ?=
TESTS_AT_ONCE ?= 4
N ?= 50
DO ?= up

# docs/images.md says what IMAGE_ARGS are good for, and docs/testing-cluster.md HELM_ARGS.
IMAGE_TOOL ?= $(shell docker info >/dev/null 2>&1 && echo docker || \
    { command -v podman >/dev/null && echo podman || echo buildah; })
IMAGE_TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' core/pyproject.toml)
IMAGE_ARGS ?=
HELM_ARGS ?=
KIND_KUBECONFIG ?= build/kind.kubeconfig

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
DEMO := $(VENV)/.demo-done
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)

# Without its dependencies, so that TORCH_ARGS may name an index that has nothing else; they come with the rest.
define INSTALL_TORCH
@$(BIN)/python -c "import torch" 2>/dev/null || test -n "$(TORCH_ARGS)" -o -e /dev/nvidiactl || \
    test "$$(uname -sm)" != "Linux x86_64" || \
    echo "torch's default build brings CUDA, several GB; docs/images.md says how TORCH_ARGS= gets the one for CPUs" >&2
$(PIP) install -q $(PIP_ARGS) $(TORCH_ARGS) --no-deps $(TORCH)
endef

.PHONY: help setup demo test lint style types tests slow soak simulate cluster image kind bench docs site screenshots clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | awk -F'\t' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv and install everything, once

$(STAMP): core/pyproject.toml client/pyproject.toml trainer/pyproject.toml operator/pyproject.toml constraints.txt requirements-dev.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found; name a Python 3.11 with PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL_TORCH)
	$(PIP) install -q $(PIP_ARGS) -e core -e client -e trainer -e operator -r requirements-dev.txt -c constraints.txt
	@touch $@

$(DEMO): core/pyproject.toml client/pyproject.toml trainer/pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found; name a Python 3.11 with PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL_TORCH)
	$(PIP) install -q $(PIP_ARGS) -e core -e client -e trainer -c constraints.txt
	@touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO)) ## train on this machine, lose two workers on the way, compare with an undisturbed run
	$(BIN)/bamboo run examples/quickstart.yaml --preempt at:15:2 --preempt at:35:1:notice --verify

test: style ## lint, then the tests that are neither slow nor soak; types are looked at beside them
	$(MAKE) --no-print-directory -j 2 types tests

lint: style types ## ruff, the import contracts and mypy

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Of a new clone nothing is judged again that is as in another one: mypy compares contents.
types: export MYPY_CACHE_DIR = $(or $(BAMBOO_CACHE),$(HOME)/.cache)/bamboo/mypy
types: $(STAMP)
	$(BIN)/mypy
	MYPYPATH=bench $(BIN)/mypy bench/*.py
	MYPYPATH=tests/support $(BIN)/mypy --follow-imports silent docs/*.py

# Some hundred processes, and pytest for its asserts, would compile everything anew if nobody kept the bytecode.
tests: export PYTHONDONTWRITEBYTECODE =
tests: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow and not soak" -n $(TESTS_AT_ONCE) --dist loadscope --durations 15 $(PYTEST_ARGS)

# A test without a limit of its own has three times as long as a fast one: four at once share two cores.
slow: export PYTHONDONTWRITEBYTECODE =
slow: $(STAMP) ## the slow tests; those of the images need root and the tools of tests/support/image_kit.py
	$(BIN)/python -m pytest -q -m "slow and not soak" --timeout 900 -n $(TESTS_AT_ONCE) --dist loadscope -rs $(PYTEST_ARGS)

soak: $(STAMP) ## random faults, N=50 rounds, and the property tests once with new examples
	BAMBOO_SOAK=$(N) $(BIN)/python -m pytest -m "soak or hypothesis" --hypothesis-profile=random --timeout=0 $(PYTEST_ARGS)

simulate: $(STAMP) ## protocol and operator under random faults in virtual time, N=50 times 100 seeds of each kind
	for kind in "" --elastic --restarts --grids; do $(BIN)/python tests/simulation/simulate.py --seeds 0:$(N)00 $$kind; done
	for kind in "" --grids; do $(BIN)/python tests/simulation/operator_simulate.py --seeds 0:$(N)0 $$kind; done  # a tenth as many, for they take longer

cluster: $(STAMP) ## a Kubernetes with Bamboo and fake nodes to play with; DO=status, DO=down
	PYTHONPATH=tests/support $(BIN)/python -m cluster $(DO)

dist: $(STAMP) ## build the distributions, as wheels and sources, into build/dist
	rm -rf build/dist
	for folder in core client trainer operator; do $(BIN)/python -m build --no-isolation -o build/dist $$folder || exit 1; done

image: ## build the images bamboo-operator and bamboo-trainer with docker, podman or buildah; IMAGE_ARGS=
	for target in operator trainer; do \
	    $(IMAGE_TOOL) build $(IMAGE_ARGS) --target $$target -t "bamboo-$$target:$(IMAGE_TAG)" .; \
	done

kind: $(STAMP) image ## images and chart on a cluster of kind, and the cluster tests there; needs docker, kind and helm
	@for tool in kind helm; do command -v $$tool >/dev/null || { echo "$$tool was not found" >&2; exit 1; }; done
	mkdir -p $(dir $(KIND_KUBECONFIG))
	kind get clusters | grep -qx bamboo || \
	    kind create cluster --kubeconfig $(KIND_KUBECONFIG) --config tests/support/cluster/kind.yaml --wait 180s
	kind get kubeconfig --name bamboo >$(KIND_KUBECONFIG)
	kind load docker-image --name bamboo "bamboo-operator:$(IMAGE_TAG)" "bamboo-trainer:$(IMAGE_TAG)"
	KUBECONFIG=$(KIND_KUBECONFIG) helm upgrade --install bamboo charts/bamboo \
	    --namespace bamboo-system --create-namespace --wait --timeout 5m \
	    --set "image.tag=$(IMAGE_TAG),workers.image.tag=$(IMAGE_TAG)" $(HELM_ARGS)
	KUBECONFIG=$(KIND_KUBECONFIG) BAMBOO_INSTALLED=1 $(BIN)/python -m pytest -m "cluster and not slow" $(PYTEST_ARGS)

bench: ## list the benchmarks
	@found=$$(find bench -maxdepth 1 -name '*.py' ! -name '_*' 2>/dev/null | sort); \
	if [ -z "$$found" ]; then echo "there are no benchmarks yet"; \
	else for f in $$found; do echo "$(BIN)/python $$f"; done; fi

docs: $(STAMP) ## write anew what is made from others: the CRD, docs/api.md, docs/cli.md, docs/python-api.md, tables in docs/metrics.md and of notices, dashboards
	$(BIN)/python crds/generate.py
	$(BIN)/python docs/generate_api.py
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_python_api.py
	$(BIN)/python docs/generate_metrics.py
	$(BIN)/python docs/generate_notices.py
	$(BIN)/python dashboards/generate.py

architectures: $(STAMP) ## compare models of transformers with themselves, and write the table in docs/huggingface.md
	$(BIN)/python docs/generate_architectures.py

site: $(STAMP) ## build the documentation site into build/site; links that lead nowhere are errors
	$(BIN)/python docs/build_site.py build/site

screenshots: $(STAMP) ## write docs/images anew: a real run, looked at with Chromium
	$(BIN)/python docs/screenshots.py

clean: ## remove caches and build outputs (.venv stays)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find core client trainer operator tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
