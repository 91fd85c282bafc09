# `make demo` and `make test` are all a newcomer needs: both set .venv up first.
PYTHON ?= python3
PYTEST_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint setup clean

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh build/demo

# The CPU suite. Whole files go to each of two workers, because a pool of gloo processes lives through a module.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

setup: $(STAMP)

# Installs again only when what it installs from has changed. constraints.txt keeps torch to a CPU build where there is one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than Python 3.11; hint: make setup PYTHON=python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[run,dev]"
	touch $(STAMP)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
