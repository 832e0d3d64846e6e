# Every target sets up what it needs: Python >= 3.11 and make are enough.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test sweep golden check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## train a small GPT on several processes of this machine
	$(BIN)/python examples/train_gpt.py

test: $(INSTALLED)  ## run the tests and doctests
	$(BIN)/python -m pytest

sweep: $(INSTALLED)  ## run the long sweeps (hours)
	$(BIN)/python -m pytest -m sweep --timeout 7200

golden: $(INSTALLED)  ## rewrite the golden files; read the diff before you commit
	$(BIN)/python -m pytest tests --update-golden

check: $(INSTALLED)  ## lint, formatting, types, imports and the wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/house

clean:  ## remove the environment and everything built
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	rm -rf htmlcov .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hf,dev]'
	touch $@
