# Everything runs in .venv; PYTHON says which Python makes it.
#
#   make demo        trains a network of fused blocks on handwritten digits, next to plain Flax
#   make test        the tests
#   make lint        formatting, lint and types
#   make benchmark   the 53 BatchNorm sites of ResNet-50 against Flax (and PyTorch, if installed)
#   make gpu         on a machine with an NVIDIA GPU: builds, tests and measures the CUDA kernels
#   make clean       removes what the others made

PYTHON ?= python3
DEMO_ARGS ?=
# A file's tests share fixtures that take long to make, so they stay together.
TEST_ARGS ?= --numprocesses=auto --maxprocesses=4 --dist=loadfile
BENCHMARK_ARGS ?= --output benchmarks/results/latest.json
GPU_ARGS ?=

BIN := .venv/bin
# What the native module is built from. The install is editable, so Python sources need no reinstall.
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard cmake/* cpu/* cuda/* native/*)
EXTRAS_test := demo,resnet50,test
# pyright wants to see whatever is imported anywhere.
EXTRAS_lint := demo,resnet50,test,bench,lint
# What is installed with it.
PARTS_test := demo
PARTS_lint := demo test bench
NATIVE_SOURCES = $(shell find cpu cuda native tests -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test venv lint benchmark gpu clean

demo: .venv/installed-demo
	$(BIN)/python examples/digits/train.py $(DEMO_ARGS)

test: .venv/installed-test
	$(BIN)/pytest $(TEST_ARGS)

venv: .venv/created

lint: .venv/installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)

benchmark: .venv/installed-bench
	$(BIN)/python -m benchmarks.launch -- $(BENCHMARK_ARGS)

# On what is installed, for the machine may be offline: CUDA 13 with nvcc, jax with its CUDA plugin,
# flax, optax, nanobind, scikit-build-core, cmake, ninja, pytest, pytest-timeout, pytest-xdist,
# hypothesis; torch and torchvision for the peers.
gpu:
	$(PYTHON) -m benchmarks.gpu $(GPU_ARGS)

.venv/created:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

.venv/installed-%: .venv/created $(BUILD_INPUTS)
	$(BIN)/python -m pip install --quiet --editable '.[$(or $(EXTRAS_$*),$*)]'
	touch $@ $(PARTS_$*:%=.venv/installed-%)

clean:
	rm -rf .venv build dist demo_output runs .pytest_cache .ruff_cache .hypothesis
