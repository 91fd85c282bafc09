# `make demo` and `make test` are all a newcomer needs: both set .venv up first.
PYTHON ?= python3
PYTEST_ARGS ?=
JOBS ?= 0
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint setup clean

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh build/demo

# The CPU suite. JOBS=2 deals whole files to two workers (a pool of gloo processes lives through a module); it costs 2 s
# to start, and on two cores the gloo tests fill the machine by themselves.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

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
