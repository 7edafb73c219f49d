# Developer entry points; `make` alone lists them. One virtual environment, .venv, installed from the locks.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
TESTS ?= tests
CONFIG ?= configs/demo.yaml
ARGS ?=

UV_VERSION := 0.13.8
VENV := .venv
LOCK_VENV := .venv-lock
BIN := $(VENV)/bin
# -qq: pip's errors only.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq --no-input
# setuptools comes with the lock, so building the editable install needs nothing more.
INSTALL_SELF := $(PIP) install --no-deps --no-build-isolation -e .

.PHONY: help serve test lint format types bench bench-fanout bench-stream lock clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 21
	@echo
	@echo "  PYTHON=$(PYTHON)  the interpreter, 3.10 to 3.12;  TESTS=$(TESTS)  what make test runs;"
	@echo "  CONFIG=$(CONFIG)  what make serve serves;  ARGS=  more arguments for serve, test and the benchmarks"

serve: $(VENV)/.runtime  ## install what is missing, check the configuration, serve it
	@$(BIN)/headwater check $(CONFIG)
	@exec $(BIN)/headwater serve $(CONFIG) $(ARGS)

test: $(VENV)/.dev  ## run the tests
	@exec $(BIN)/python -m pytest $(TESTS) $(ARGS)

lint: $(VENV)/.dev  ## ruff: rules and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/.dev  ## mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/.dev  ## mypy --strict
	@$(BIN)/mypy

bench: $(VENV)/.dev  ## benchmark the gateway
	@exec $(BIN)/python -m benchmarks.gateway $(ARGS)

bench-fanout: $(VENV)/.dev  ## benchmark one trunk with two heads
	@exec $(BIN)/python -m benchmarks.fanout $(ARGS)

bench-stream: $(VENV)/.dev  ## benchmark token streams
	@exec $(BIN)/python -m benchmarks.stream $(ARGS)

clean:  ## remove the environments, caches and build output
	rm -rf $(VENV) $(LOCK_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find app inference tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: a set-up runs again when a lock or pyproject.toml changes, and costs nothing otherwise.

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: no '$(PYTHON)' found. Install Python 3.10, 3.11 or 3.12 (on Debian: apt-get install python3 python3-venv)," \
	    "or name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || { \
	  echo "make: expected Python 3.10, 3.11 or 3.12 (PyTriton needs numpy 1.26), got $$($(PYTHON) -V 2>&1)." \
	    "Name another: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $$($(PYTHON) -V) cannot make a virtual environment: its venv or ensurepip module is missing." \
	    "On Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.python requirements.lock pyproject.toml
	@echo "Installing requirements.lock into $(VENV) (minutes the first time) ..."
	@$(PIP) install -r requirements.lock
	@$(INSTALL_SELF)
	@touch $@

# The development lock holds the runtime's pins too, so it makes both stamps.
$(VENV)/.dev: $(VENV)/.python requirements-dev.lock pyproject.toml
	@echo "Installing requirements-dev.lock into $(VENV) (minutes the first time) ..."
	@$(PIP) install -r requirements-dev.lock
	@$(INSTALL_SELF)
	@touch $(VENV)/.runtime $@

# The locks. Pins stay as they are where pyproject.toml still allows them; `make lock ARGS=--upgrade` takes the newest.
# Development first: the runtime lock is then always a part of it. What a CUDA build of torch pulls in is left out,
# because the build decides that, and pip resolves it when it installs torch. uv repeats in every marker the one system
# that pyproject.toml has it resolve for; without that a marker says what it should, the Python version.
LOCK_HEADER := \# Exact pins for Python 3.10 to 3.12 on Linux. Made by `make lock` from pyproject.toml: do not edit.
DROP_CUDA := /^nvidia-pytriton==/b; /^(nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+|triton)==/d
DROP_SYSTEM := s/ and implementation_name == 'cpython' and platform_machine == 'x86_64'// ; \
  s/ and platform_python_implementation != 'PyPy'// ; s/ and sys_platform == 'linux'// ; \
  s/ and python_full_version < '3.13'// ; s/ ; python_full_version < '3.13'$$//
COMPILE := $(LOCK_VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate

lock: $(LOCK_VENV)/.uv-$(UV_VERSION)  ## resolve pyproject.toml into the two locks
	@cp requirements-dev.lock $(LOCK_VENV)/dev.txt 2>/dev/null || true
	@cp requirements.lock $(LOCK_VENV)/runtime.txt 2>/dev/null || true
	@$(COMPILE) $(ARGS) --extra dev -o $(LOCK_VENV)/dev.txt pyproject.toml >/dev/null
	@$(COMPILE) -c $(LOCK_VENV)/dev.txt -o $(LOCK_VENV)/runtime.txt pyproject.toml >/dev/null
	@for name in dev runtime; do \
	  { echo '$(LOCK_HEADER)'; sed -E -e "$(DROP_SYSTEM)" -e '$(DROP_CUDA)' $(LOCK_VENV)/$$name.txt; } > $(LOCK_VENV)/$$name.lock; done
	@mv $(LOCK_VENV)/dev.lock requirements-dev.lock
	@mv $(LOCK_VENV)/runtime.lock requirements.lock

$(LOCK_VENV)/.uv-$(UV_VERSION): $(VENV)/.python
	@$(BIN)/python -m venv --clear $(LOCK_VENV)
	@$(LOCK_VENV)/bin/python -m pip --disable-pip-version-check -qq --no-input install uv==$(UV_VERSION)
	@touch $@
