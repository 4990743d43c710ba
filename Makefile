# Every command that a person or CI runs. `make` alone lists them.
#
# PIP_ARGS is handed to pip; on a machine whose index serves torch with CUDA, point it at an index of CPU builds.

PYTHON ?= python3
VENV ?= .venv
SEEDS ?= 10000
PIP_ARGS ?=
BIN := $(VENV)/bin
# Not compiled: of the 18,000 files of a full set-up a fifth is ever imported, and Python compiles those by itself.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt $(PIP_ARGS)
# $(call timed,COMMAND) runs it and says how many seconds it took; its status is kept.
timed = @begin=$$(date +%s); $(1); status=$$?; echo "$@: $$(($$(date +%s) - begin)) s"; exit $$status

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test static nightly sim pytest lint types imports protos protos-check fmt bench clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.setup ## Make .venv with what a CPU mesh needs

setup-dev: $(VENV)/.setup-dev ## The same with linters, type checker and test tools

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 3; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.setup: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[cpu]' transformers apache-tvm-ffi pydantic
	$(PIP) --no-deps xgrammar
	@touch $@

$(VENV)/.setup-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev,grammar]'
	@touch $@ $(VENV)/.setup

demo: setup ## Start a mesh, stream one answer, stop, say how to go on
	@$(BIN)/v4mesh demo

test: setup-dev ## The CI lane: static checks, tests and simulation on two cores
	@tools/lane.sh $(BIN) $(SEEDS)

static: setup-dev ## lint, types, imports, protos-check
	$(call timed,$(MAKE) --no-print-directory lint types imports protos-check)

lint: setup-dev ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup-dev ## mypy --strict
	@$(BIN)/mypy

imports: setup-dev ## Who may import whom
	@$(BIN)/lint-imports

protos: setup-dev ## Regenerate protos/gen
	@PYTHON=$(BIN)/python tools/gen_protos.sh

protos-check: setup-dev ## Is protos/gen what protos/meshpb says?
	@PYTHON=$(BIN)/python tools/gen_protos.sh --check

sim: setup-dev ## The protocol in simulation: make sim SEEDS=100000
	$(call timed,$(BIN)/python -m tests.sim --seeds $(SEEDS))

pytest: setup-dev
	@$(BIN)/pytest -m "not nightly and not gpu"

nightly: setup-dev ## What takes longer than the CI lane allows
	@$(MAKE) --no-print-directory sim SEEDS=200000
	@$(BIN)/pytest -m "not gpu"

fmt: setup-dev ## Format, and fix what ruff can fix
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: setup-dev ## One benchmark: make bench NAME=flags; without NAME: list them
	@$(BIN)/python -m benchmarks $(or $(NAME),list) $(ARGS)

clean: ## Remove .venv and everything that was generated
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
