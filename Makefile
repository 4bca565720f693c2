# Everything from a fresh clone: `make demo`, `make test`. Needs python3 (3.10 or newer, with venv) and nothing else.
PYTHON ?= python3
TESTS ?= tests
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
SCREENSHOTS ?= build/screenshots# `make test-browser SCREENSHOTS=docs/images` makes those of the documentation anew
RUNTIME ?= # stock: `make venv` takes the stock onnxruntime also where the one with both engines exists

ROOMS := federation edge_runtime coordinator model_export bench simulation embrace
comma := ,
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := .venv/$(SCRIPTS)
READY := .venv/.ready
DEMO_READY := .venv-demo/.ready
STOCK_READY := .venv-stock/.ready
FUZZ_READY := .venv-fuzz/.ready
RAY_READY := .venv-ray/.ready
SCALE_READY := .venv-scale/.ready
DOCS_READY := .venv-docs/.ready
NODE_READY := browser/node_modules/.ready
ARM64 := build/arm64

.DEFAULT_GOAL := help
.PHONY: help venv venv-stock demo test pytest test-slow test-browser web test-ray test-scale test-arm64 fuzz coverage docs lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO_READY) ## see it work: a coordinator and four agents train a small network (without PyTorch)
	.venv-demo/$(SCRIPTS)/embrace demo

venv: $(READY) ## create .venv: every part of the project and the development tools

venv-stock: $(STOCK_READY) ## create .venv-stock: what a device has, with the newest stock onnxruntime and no torch

test: lint pytest ## lint, type check, and every test that is not slow (TESTS=tests/federation: only those)

# The limit measures nothing: a test that would wait for ever fails with its stack, and the others go on.
pytest: $(READY) $(STOCK_READY) ## the tests alone
	$(BIN)/python -m pytest -n 2 --timeout 600 -m "not slow" $(TESTS)

test-slow: $(READY) $(STOCK_READY) ## the slow tests only
	$(BIN)/python -m pytest -m slow $(TESTS)

test-browser: $(READY) web ## the agent in a page and the dashboard: the same numbers as the Python's, and real Chromium (needs Node)
	cd browser && npm test
	@test -n "$(CHROMIUM)" || { echo 'no Chromium found: make test-browser CHROMIUM=/path/to/chromium'; exit 1; }
	cd browser && PYTHON=$(CURDIR)/$(BIN)/python CHROMIUM=$(CHROMIUM) SCREENSHOTS=$(SCREENSHOTS) npm run test:chromium

web: $(NODE_READY) ## build the pages (/ and /join) into coordinator/web (needs Node); a wheel built afterwards has them
	cd browser && npm run build

test-ray: $(RAY_READY) ## simulations on Ray, one node and two that share no folder: the same results
	.venv-ray/$(SCRIPTS)/python -m pytest tests/simulation/test_pool.py tests/simulation/test_simulate.py tests/simulation/test_ray_nodes.py

test-scale: $(SCALE_READY) ## the coordinator's tests on PostgreSQL 15 (package postgresql-15), and blobs on two S3 servers
	.venv-scale/$(SCRIPTS)/python -m tests.coordinator.on_postgresql -n 2 -m "not slow" tests/coordinator

test-arm64: $(ARM64)/.ready ## the same numbers on aarch64, under emulation: federation, a step of every model, an agent
	$(ARM64)/bin/python -m pytest -n 2 -p no:cacheprovider tests/federation
	EMBRACE_ARM64_PYTHON=$(CURDIR)/$(ARM64)/bin/python $(BIN)/python -m pytest -n 2 tests/arm64

fuzz: $(FUZZ_READY) ## two minutes of nonsense for the parser of updates and for the API of a running coordinator
	.venv-fuzz/$(SCRIPTS)/python -m tests.fuzz.fuzz_wire --seconds 20
	.venv-fuzz/$(SCRIPTS)/python -m tests.fuzz.fuzz_api --seconds 90

coverage: $(READY) $(STOCK_READY) ## which lines the tests run; fails below the floor in pyproject.toml
	$(BIN)/python -m pytest -n 2 -m "not slow" --cov --cov-report=term:skip-covered $(TESTS)

docs: $(DOCS_READY) ## the documentation as a site, in build/site: every link is checked
	NO_MKDOCS_2_WARNING=1 .venv-docs/$(SCRIPTS)/mkdocs build --strict

lint: $(READY) ## ruff, its formatter, and mypy --strict on every package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(ROOMS)

format: $(READY) ## write the code as ruff would
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove all environments and every cache
	rm -rf browser/node_modules coordinator/web .venv .venv-demo .venv-stock .venv-fuzz .venv-ray .venv-scale .venv-docs build *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call environment,FOLDER,OPTIONS AND EXTRAS): the stamp is written last, so that an interrupted installation is
# continued by the next `make`.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(1)
	$(1)/$(SCRIPTS)/python -m pip install $(2)
	touch $(1)/.ready
endef

STOCK_ROLES := edge,images,coordinator,export,bench,dev
EVERYTHING = $(if $(filter stock,$(RUNTIME)),$(STOCK_ROLES),everything)
$(READY): pyproject.toml constraints.txt
	$(call environment,.venv,--constraint constraints.txt --editable '.[$(EVERYTHING)]')

$(DEMO_READY): pyproject.toml constraints.txt
	$(call environment,.venv-demo,--constraint constraints.txt --editable '.[edge$(comma)coordinator]')

# No constraints here: a device takes whatever is current, and the exported graphs have to run on that too.
$(STOCK_READY): pyproject.toml
	$(call environment,.venv-stock,--upgrade --editable '.[edge]')

# An environment of its own: schemathesis is a plugin of pytest, and the tests should not run with it.
$(FUZZ_READY): pyproject.toml constraints.txt
	$(call environment,.venv-fuzz,--constraint constraints.txt --editable '.[coordinator$(comma)fuzz]')

# Ray is large, and few need it.
$(RAY_READY): pyproject.toml constraints.txt
	$(call environment,.venv-ray,--constraint constraints.txt --editable '.[everything$(comma)ray]')

# What a coordinator on PostgreSQL and object storage has, and S3 servers; PostgreSQL itself is Debian's.
$(SCALE_READY): pyproject.toml constraints.txt
	$(call environment,.venv-scale,--constraint constraints.txt --editable '.[edge$(comma)images$(comma)coordinator$(comma)dev$(comma)scale-test]')

# Debian's packages and wheels for aarch64, unpacked; the emulator as well, where the system has none.
$(ARM64)/.ready: $(READY) tests/arm64/userland.py
	$(BIN)/python -m tests.arm64.userland $(ARM64)
	touch $@

# The site is built without a network from here on.
$(DOCS_READY): pyproject.toml constraints.txt
	$(call environment,.venv-docs,--constraint constraints.txt --editable '.[docs]')

# Exactly what the lock file says.
$(NODE_READY): browser/package-lock.json
	@command -v npm >/dev/null || { echo 'Node 20.19 or newer is needed for what is in browser/'; exit 1; }
	cd browser && npm ci
	touch $@
