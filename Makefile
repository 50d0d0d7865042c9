# SPDX-License-Identifier: Apache-2.0
# make demo: a real model answers through vLLM with target-row trees.  make test: lint and all tests.

PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: help demo test lint environment model
.DEFAULT_GOAL := help

help:
	@echo "make demo   answers of an embedded model through vLLM with target-row trees, and their speed"
	@echo "make test   ruff, mypy and all tests"
	@echo "make lint   ruff and mypy"

demo: environment model
	@$(BIN)/vllm-targetrows demo

# pytest by its console script: `python -m pytest` would put the repository's root on sys.path, and with it the folder
# triton_kernels/ under a name that vLLM imports.
# Two workers, a file at a time each: most engines of the tests use one core.
test: lint model
	$(BIN)/pytest -n 2 --dist loadfile

lint: environment
	$(BIN)/ruff check .
	$(BIN)/mypy

environment:
	@test "$$(uname -s)" = Linux || { echo "error: the CPU stack is locked for Linux, this is $$(uname -s)" >&2; exit 1; }
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); \
	case "$$version" in \
	3.11) ;; \
	"") echo "error: Python 3.11 is needed: $(PYTHON) does not start (make PYTHON=/path/to/python3.11)" >&2; exit 1 ;; \
	*) echo "error: Python 3.11 is needed: $(PYTHON) is $$version (make PYTHON=/path/to/python3.11)" >&2; exit 1 ;; \
	esac
	@$(PYTHON) scripts/environment.py

model: environment
	@$(BIN)/vllm-targetrows model target >/dev/null
