## make setup     create .venv, with everything in it
## make demo      train a GPT under a third of the memory it needs; ARGS="--steps 50" passes options on
## make train     train that GPT for 1500 steps beside plain PyTorch (about 20 minutes); Ctrl-C ends it, and it goes on
## make test      the quick tests; ARGS="tests/test_options.py" picks some
## make test-second  the tests of the second tier, which take longer; CI runs them too
## make test-all  all tests, with the slow ones
## make test-versions  a part of the tests on every PyTorch that is supported; ARGS="2.14" picks some
## make test-cuda  the CUDA path on a GPU made of RAM, in an environment of its own (5 GB); ARGS="--torch 2.11" names
##                 another PyTorch (PYTHON=python3.12); see docs/cuda.md
## make lint      ruff, check and format
## make types     mypy
## make bench     the measurements of docs/results.md; ARGS="fits" picks some
## make page      the explanation that docs/explain.md shows, as a page: runs/explain.html

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DEMO_STAMP := $(VENV)/.demo
ARGS ?=
TORCH := torch==2.13.0

# What `make test-cuda` installs, by PyTorch's version: packages of a row are tested together. `===` takes the build that
# the registry has under the plain version: on Linux, CUDA's.
CUDA_2.13 := $(subst ==,===,$(TORCH)) numpy
CUDA_2.11 := torch===2.11.0 triton==3.6.0 numpy==2.5.2
# `--torch VERSION` in ARGS is make's own; the rest goes on to pytest.
CUDA_ARGS := $(subst --torch ,--torch=,$(ARGS))
CUDA_TORCH := $(or $(patsubst --torch=%,%,$(filter --torch=%,$(CUDA_ARGS))),2.13)
CUDA_VENV ?= .venv-cuda$(addprefix -,$(filter-out 2.13,$(CUDA_TORCH)))
CUDA_BIN := $(CUDA_VENV)/bin

ifeq ($(shell uname -s),Darwin)
DEFAULT_CXX := clang++
else
DEFAULT_CXX := g++
endif
# GNU make predefines CXX; torch's compiler reads the environment's, else its own default.
COMPILER := $(if $(filter default,$(origin CXX)),$(DEFAULT_CXX),$(CXX))

# Python keeps bytecode, whatever the shell says: without it each process compiles PyTorch's 2,800 modules anew, which takes
# ten processor seconds, and tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup check demo train test test-second test-all test-versions test-cuda lint types bench page
.DEFAULT_GOAL := help

help:
	@sed -n 's/^## //p' Makefile

setup: $(STAMP)

check:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: no $(PYTHON) found; install Python 3.11 or newer, or run: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), and Python 3.11 or newer is needed; run: make $(MAKECMDGOALS) PYTHON=python3.12 (say)" >&2; exit 1; }
	@command -v $(firstword $(COMPILER)) >/dev/null || { \
	  echo "error: no C++ compiler: $(firstword $(COMPILER)) is not on PATH; install it (Debian, Ubuntu: apt install g++; macOS: xcode-select --install) or set CXX" >&2; exit 1; }
	@$(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' || { \
	  echo "error: $(PYTHON) has no Python.h, which compiled kernels include; install its headers (Debian, Ubuntu: apt install python3-dev)" >&2; exit 1; }

# `--no-compile`: of tens of thousands of files few are ever imported, and Python compiles those itself.
$(DEMO_STAMP): pyproject.toml Makefile | check
	@echo "making $(VENV), with PyTorch (some 200 MB) and what the demonstration needs; this happens once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --quiet "setuptools>=77" wheel
	$(BIN)/python -m pip install --no-compile $(TORCH)
	$(BIN)/python -m pip install --no-compile --no-build-isolation -e ".[demo]"
	@touch $@

$(STAMP): $(DEMO_STAMP)
	@echo "installing what the tests and the other commands need; this happens once"
	$(BIN)/python -m pip install --no-compile --no-build-isolation -e ".[dev]"
	@touch $@

demo: $(DEMO_STAMP)
	$(BIN)/python bench/demo.py $(ARGS)

train: $(STAMP)
	$(BIN)/python bench/train.py $(ARGS)

# Two workers, each with half of the tests in order and then with some that the other has left, so that files stay
# together and none idles at the end. Threads that wait for each other give the processor away meanwhile.
test test-second test-all: export PYTHONSAFEPATH := 1
test test-second test-all: export OMP_WAIT_POLICY := PASSIVE
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not second_tier" $(ARGS)

test-second: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist load -m "second_tier and not slow" $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-versions: | check
	PYTHON=$(PYTHON) tests/versions.sh $(ARGS)

$(CUDA_VENV)/.stamp: pyproject.toml | check
	$(if $(CUDA_$(CUDA_TORCH)),,$(error no versions are pinned for PyTorch $(CUDA_TORCH): write CUDA_$(CUDA_TORCH) in the Makefile))
	$(PYTHON) -m venv $(CUDA_VENV)
	PIP_FIND_LINKS= $(CUDA_BIN)/python -m pip install --no-compile "setuptools>=77" wheel $(CUDA_$(CUDA_TORCH))
	PIP_FIND_LINKS= $(CUDA_BIN)/python -m pip install --no-compile --no-build-isolation -e ".[dev]" $(CUDA_$(CUDA_TORCH))
	@touch $@

test-cuda: export PYTHONSAFEPATH := 1
test-cuda: $(CUDA_VENV)/.stamp
	$(CUDA_BIN)/python tests/gpu_in_ram/all_tests.py $(filter-out --torch=%,$(CUDA_ARGS))

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(STAMP)
	$(BIN)/python -m mypy

bench: $(STAMP)
	$(BIN)/python bench/run.py $(ARGS)

page: $(STAMP)
	@mkdir -p runs
	$(BIN)/chunkc explain gpt-1b --hardware rtx2060-6g --batch-size 4 --activation-checkpointing --format html \
	  --output runs/explain.html
