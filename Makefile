# Phalanx: the verbs of this repository. `make demo` and `make test` need only Python 3.11+, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test processes: many tests wait for a server, and each process takes about 2 GB.
JOBS ?= 2
STAMP := $(VENV)/.installed

.PHONY: help setup demo test test-gpu check format lint type soak fuzz clean

help: ## list the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## create .venv and install Phalanx with its test tools

$(STAMP): pyproject.toml constraints.txt
	@echo "setup: creating $(VENV) and installing torch, transformers and the test tools (some GB, minutes)"
	@test -x $(BIN)/pip || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "setup: %s is Python %d.%d, 3.11 or newer is needed: make ... PYTHON=python3.12" \
	  % (sys.executable, *sys.version_info[:2]))'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev,plot]"
	touch $(STAMP)

demo: setup ## bring a model, serve it, chat with it, benchmark it
	$(BIN)/python -m phalanx.demo

test: setup ## the whole CPU suite
	$(BIN)/phalanx pull smollm2
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-gpu: setup ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

check: format lint type ## format, lint, types, import directions
	$(BIN)/python -m pytest -q tests/unit/test_imports.py

format: setup
	$(BIN)/ruff format --check .

lint: setup
	$(BIN)/ruff check .

type: setup
	$(BIN)/mypy

soak: setup ## long mixed load against a real server (10 minutes)
	$(BIN)/python -m pytest tests/soak -q -s --timeout 1800 -p no:cacheprovider

fuzz: setup ## long property tests
	PHALANX_PROFILE=fuzz $(BIN)/python -m pytest -q -m fuzz --timeout 3600

clean: ## remove what `setup` made
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
