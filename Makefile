# Everything from a fresh clone: `make demo`, `make test`. Needs python3 (3.10 or newer, with venv) and nothing else.
PYTHON ?= python3

BIN := .venv/bin
TYPED := $(wildcard federation edge_runtime coordinator)
READY := .venv/.ready
STOCK_READY := .venv-stock/.ready
FUZZ_READY := .venv-fuzz/.ready
RAY_READY := .venv-ray/.ready
DOCS_READY := .venv-docs/.ready

.DEFAULT_GOAL := help
.PHONY: help venv venv-stock demo test test-slow test-ray fuzz docs lint clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY) ## create .venv: every part of the project and the development tools

venv-stock: $(STOCK_READY) ## create .venv-stock: what a device has, with the newest stock onnxruntime and no torch

demo: $(READY) ## see it work: a coordinator and four agents train a small network
	$(BIN)/embrace demo

test: lint $(STOCK_READY) ## lint, type check, and every test that is not slow
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(READY) $(STOCK_READY) ## the slow tests only
	$(BIN)/python -m pytest -m slow

test-ray: $(RAY_READY) ## simulations whose devices are tasks of a local Ray: the same results
	.venv-ray/bin/python -m pytest tests/simulation/test_pool.py tests/simulation/test_run.py

fuzz: $(FUZZ_READY) ## two minutes of nonsense for the parser of updates and for the API of a running coordinator
	.venv-fuzz/bin/python -m tests.fuzz.fuzz_wire --seconds 20
	.venv-fuzz/bin/python -m tests.fuzz.fuzz_api --seconds 90

docs: $(DOCS_READY) ## the documentation as a site, in build/site: every link is checked
	.venv-docs/bin/mkdocs build --strict

lint: $(READY) ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy $(TYPED)

clean: ## remove all environments and every cache
	rm -rf .venv .venv-stock .venv-fuzz .venv-ray .venv-docs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted installation is continued by the next `make`.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[everything]'
	touch $@

# No constraints here: a device takes whatever is current, and the exported graphs have to run on that too.
$(STOCK_READY): pyproject.toml
	$(PYTHON) -m venv .venv-stock
	.venv-stock/bin/python -m pip install --upgrade --editable '.[edge]'
	touch $@

# An environment of its own: schemathesis is a plugin of pytest, and the tests should not run with it.
$(FUZZ_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip install --constraint constraints.txt --editable '.[coordinator,fuzz]'
	touch $@

# Ray is large, and few need it.
$(RAY_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --constraint constraints.txt --editable '.[everything,ray]'
	touch $@

# The site is built without a network from here on.
$(DOCS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --constraint constraints.txt --editable '.[docs]'
	touch $@
