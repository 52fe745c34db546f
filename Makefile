# Every target sets up what it needs in .venv first; a machine with Python 3.11+ and make is enough.
# Another interpreter: `make PYTHON=python3.12 demo`. Options for pip: `make PIP_ARGS=... demo`.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

# One thread per test process: the models in the tests are tiny, and two processes use two cores better.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help demo install test test-all test-gpu lint format docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      install, then train a small GPT on this machine and show what it writes"
	@echo "make install   install only: afterwards .venv/bin/seedbed is the command"
	@echo "make test      lint and the fast tests"
	@echo "make test-all  the slow tests: fault matrix, drills, whole commands"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make lint      ruff and pyright        make format   let ruff rewrite the files"
	@echo "make docs      the docs as a site with search: build/docs/index.html; a dead link is an error"
	@echo "make bench     the CPU benchmarks; each writes benchmarks/results/NAME.json"
	@echo "make clean     remove .venv and caches"

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "seedbed needs Python 3.11 or newer; name one: make PYTHON=python3.12 demo"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Of 9,000 modules the demo imports 1,300: Python compiles those when it first meets them, which takes 2 s instead of 19.
$(VENV)/.core: pyproject.toml | $(VENV)/.made
	$(BIN)/python -m pip install --no-compile $(PIP_ARGS) -e ".[serve]"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.made
	$(BIN)/python -m pip install $(PIP_ARGS) -e ".[dev]"
	@touch $(VENV)/.core $@

install: $(VENV)/.core

demo: $(VENV)/.core
	$(BIN)/seedbed demo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(PYTEST) -m "not slow" -n $(WORKERS)

test-all: $(VENV)/.dev
	$(PYTEST) -m slow -n $(WORKERS) --durations 20

# Most of the time is compiling, on one core each; the tests of a file share what was compiled.
test-gpu: $(VENV)/.dev
	$(PYTEST) -m gpu -n 4 --dist loadfile --durations 10

docs: $(VENV)/.dev
	$(BIN)/python docs/reference.py
	$(BIN)/python -m sphinx -W --keep-going -n -q -E docs build/docs
	@echo "open build/docs/index.html"

# The scripts named for a GPU are run there by hand: `python benchmarks/gpt_gpu.py`; so is the tour, and what compares two checkouts.
GPU_BENCHMARKS = $(addprefix benchmarks/,gpt_gpu.py flow_gpu.py flow_cifar.py shakespeare.py thinker.py ebt.py world.py tour.py before_after.py)
CPU_BENCHMARKS = $(filter-out $(GPU_BENCHMARKS),$(wildcard benchmarks/[a-z]*.py))

bench: $(VENV)/.core
	@for script in $(CPU_BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build/docs docs/reference
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
