# Every target sets up what it needs: Python >= 3.11 and make are enough.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

CASES ?= 500
FIRST ?= 0
PROCESSES ?= 2
TORCH ?= 2.13.0 2.14.0 2.15.0

.DEFAULT_GOAL := help
.PHONY: help install demo test sweep random gpu golden screenshots check wheels docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## set up .venv; everything else does so by itself

demo: $(INSTALLED)  ## train a small GPT on several processes of this machine
	$(BIN)/python examples/train_gpt.py

test: $(INSTALLED)  ## run the tests and doctests
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 3 --dist loadscope

sweep: $(INSTALLED)  ## run the long sweeps (hours)
	$(BIN)/python -m pytest -m sweep --timeout 7200

random: $(INSTALLED)  ## train random models; CASES=500 FIRST=0 PROCESSES=2 (half an hour)
	CASES=$(CASES) FIRST=$(FIRST) PROCESSES=$(PROCESSES) \
	$(BIN)/python -m pytest -m sweep -s --timeout 7200 tests/random_models

gpu: $(INSTALLED)  ## prove and measure on the GPUs of this machine, one table
	$(BIN)/python -m benchmarks.gpu

golden: $(INSTALLED)  ## rewrite the golden files; read the diff before you commit
	$(BIN)/python -m pytest tests --update-golden

screenshots: $(INSTALLED)  ## draw the pictures of a report in docs/images
	$(BIN)/python -m tests.browser.screenshots

check: $(INSTALLED)  ## lint, formatting, types, imports and the wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/house
	$(MAKE) docs

wheels: $(INSTALLED)  ## try the wheel in fresh environments; TORCH="2.13.0 2.15.0" or here
	.ci/wheels $(TORCH)

docs: $(INSTALLED)  ## build the documentation, as pages in build/docs; no network is needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## remove the environment and everything built
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	rm -rf htmlcov .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs,hf,report]'
	touch $@
