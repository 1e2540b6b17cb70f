# PYTHON=python3.11 (a name or a path) chooses the interpreter; scripts/setup says how it is found.
PYTHON ?=
TESTS ?=
ARGS ?=
export PYTHON

# Every target but help and clean sets up first, which takes no time where it is done already.
IN_ENVIRONMENT = venv=$$(scripts/setup) && "$$venv"/bin

.PHONY: help setup demo test lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make the environment (.venv, or .venv-X.Y with PYTHON=pythonX.Y)
	@scripts/setup

demo: ## pretrain a small GPT on two local ranks, with ARGS="key=value ..."; goes on where it was stopped
	@$(IN_ENVIRONMENT)/mixle-megatron pretrain configs/tiny_gpt_cpu.yaml $(ARGS)

test: ## run the tests, or those that TESTS="tests/a.py tests/b.py" names
	@$(IN_ENVIRONMENT)/python -m pytest $(TESTS)

lint: ## check style and formatting
	@$(IN_ENVIRONMENT)/ruff check . && "$$venv"/bin/ruff format --check .

clean: ## remove the environments and the runs
	rm -rf .venv .venv-3.* runs
