PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RANKS ?= 2
CASES ?= 5000

.DEFAULT_GOAL := help
.PHONY: help install test check format ut st test-long demo docs bench soak gpu clean

help:              ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed   ## make the environment: everything that the other targets need

$(VENV)/.installed: pyproject.toml requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/dev.txt -e '.[dev]'
	@touch $@

test: check        ## install, then the whole check: what CI runs

check: install     ## format, lint, types, import contracts, documentation, doctests and tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) docs
	$(BIN)/python -m pytest -m "not gpu and not long" -q -n 2 --dist loadfile

format: install    ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

ut: install        ## tests in one process; seconds
	$(BIN)/python -m pytest -q tests/ut hyper_parallel

st: install        ## tests on several gloo ranks
	$(BIN)/python -m pytest -q tests/st

test-long: install ## tests that take minutes, and the property test over layouts with CASES cases (5000)
	$(BIN)/python -m pytest -q -m long
	HYPER_PARALLEL_CASES=$(CASES) $(BIN)/python -m pytest -q --hypothesis-show-statistics tests/st/core/optimizer/test_property.py

docs: install      ## the documentation site, into docs/_build; a warning is an error
	$(BIN)/sphinx-build -W -n --keep-going -q docs docs/_build

demo: install      ## train a small GPT with Muon and with AdamW on RANKS ranks (2), and compare
	$(BIN)/python -m examples.compare --nproc $(RANKS) $(ARGS)

bench: install     ## one step beside every peer that runs here, into benchmarks/results; half an hour
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/dev.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.steps --growth --profile --output benchmarks/results $(ARGS)

soak: install      ## train 2,000 steps while ranks are killed 33 times, and compare bits; 15 minutes
	$(BIN)/python -m benchmarks.soak $(ARGS)

gpu: install       ## tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu

clean:             ## remove the environment, caches and runs
	rm -rf $(VENV) build dist docs/_build runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
