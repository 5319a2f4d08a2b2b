# Needs python3 >= 3.10 (with venv and headers), a C++20 compiler and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := build/core
export PATH := $(CURDIR)/$(BIN):$(PATH)
# What is imported is compiled then, once.
unexport PYTHONDONTWRITEBYTECODE

SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help demo bench test quick lint format build clean

help:
	@echo "make demo       route 1,797 handwritten digits over 4 ranks"
	@echo "make bench      measure the exchanges"
	@echo "make quick      the quick loop: builds, then 20 s of tests: NumPy's front end, the operation, its cases of the matrix"
	@echo "make test       all but slow tests: lint, C++ and Python tests, sanitizers, aarch64, wheel;"
	@echo "                APT=1 has it install Debian packages that are missing, as root"
	@echo "make lint       ruff, clang-format, mypy        make format   rewrite to the style"
	@echo "make clean      remove all that was built, .venv too"

# The emulator only where torch_npu is installed: the demo uses it there.
demo: PARTS = $(if $(wildcard $(VENV)/lib/python3*/site-packages/torch_npu),,--target _core_stub)
demo: build
	@python -m alltoallv demo

bench: build
	python -m alltoallv bench

# The sessions of noxfile.py; `nox -s tsan` from the environment runs one. Warnings are errors from here on.
test: export CMAKE_ARGS += -DALLTOALLV_TESTS=ON -DALLTOALLV_WERROR=ON
test: build
	@python .ci/debian.py --install
	nox -t first
	@$(MAKE) --no-print-directory --keep-going --jobs=4 test-lane-a test-lane-b test-lane-c test-lane-d; done=$$?; \
	  python .ci/debian.py; exit $$done

# Side by side: much of what tests do is wait, and d compiles when others do. Every line says whose it is.
test-lane-%:
	@set -o pipefail; nox -t lane-$* 2>&1 | sed -u 's/^/[$*] /'

# Ranks that die and jobs of many calls take seconds each; `nox -s tests` from the environment runs all.
quick: build
	pytest -q tests/numpy tests/operation tests/matrix -m "not slow" -k "not membership and not dispatcher"

lint: build
	nox -s lint

format: $(VENV)/.installed
	nox -s format

# Into the working tree. Ninja knows what changed: a second or two where nothing did.
build: $(VENV)/.installed
	@cmake -S . -B $(BUILD) -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python $(CMAKE_ARGS) > /dev/null
	@cmake --build $(BUILD) $(PARTS) -- --quiet
	@cmake --install $(BUILD) --component python --prefix python > /dev/null

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "alltoallv needs Python 3.10 or newer; choose one with 'make PYTHON=...'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv: install it (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo "$(PYTHON) has no headers: install them (Debian, Ubuntu: apt-get install python3-dev)" >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || \
	  { echo "no C++ compiler: install one (Debian, Ubuntu: apt-get install g++) or set CXX" >&2; exit 1; }
	@echo "making the environment $(VENV) and building; a few minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@pip install -qq "uv>=0.8,<1"
	@eval "$$(python .ci/uv_settings.py)"; uv pip install --quiet --config-setting compile=no --editable ".[dev]"
	@# Without the backend's finder: it would come before PYTHONPATH, and there is nothing for it to rebuild.
	@sed -i '/^import /d' $(VENV)/lib/python*/site-packages/_editable_skbc_alltoallv.pth
	@touch $@

clean:
	rm -rf build dist demo-output $(VENV) .nox .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf python/*.egg-info python/alltoallv/_core.pyi python/alltoallv/_core*.so python/alltoallv_emulator/lib python/alltoallv_emulator/_host*.so
