# Everything runs in .venv, which PYTHON creates. `make help` lists the targets; CONTRIBUTING.md says
# of those for tests, lint and docs when to use each and how long it takes.

.DEFAULT_GOAL := help

PYTHON ?= python3
DEMO_ARGS ?=
TEST_ARGS ?= --numprocesses=auto --maxprocesses=4
SLOW_TESTS ?= slow
BENCHMARK_ARGS ?= --output benchmarks/results/latest.json
GPU_ARGS ?=
# The empty default does smoke, install and check; .ci/run does them separately.
VERSION_MATRIX_ARGS ?=
DIST_ARGS ?=
DOCKER ?= docker

BIN := .venv/bin
NATIVE_SOURCES = $(shell find benchmarks cpu cuda native python_module tests -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# A .venv that is there already has the Python that it was made with.
PRINT_VERSION := -c 'import sys; print("%d.%d" % sys.version_info[:2])'
IS_TOLD := $(and $(filter-out file,$(origin PYTHON)),$(wildcard $(BIN)/python))
THERE := $(if $(filter clean help,$(MAKECMDGOALS)),,$(if $(IS_TOLD),$(shell $(BIN)/python $(PRINT_VERSION))))
ifneq ($(THERE),$(if $(THERE),$(shell $(PYTHON) $(PRINT_VERSION))))
$(error .venv has Python $(THERE), which $(PYTHON) is not; `make clean` removes it, or leave PYTHON out)
endif

# --- What is installed in .venv ---

# pyright needs every package that is imported anywhere.
EXTRAS_demo := demo
EXTRAS_bench := bench
EXTRAS_dist := dist
EXTRAS_test := demo,resnet50,test
EXTRAS_lint := demo,resnet50,test,bench,lint
# The extras that each of these includes.
PARTS_test := demo
PARTS_lint := demo test bench

# What the native module is built from. The install is editable, so Python sources do not count.
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(shell find cmake cpu cuda native python_module -type f)
DIST_INPUTS := $(BUILD_INPUTS) README.md LICENSE AUTHORS .ci/make_dist.py .ci/check_wheel.py \
  .ci/requirements.py .ci/find_python $(shell find jax_bnar distributions -type f ! -name '*.pyc')
# The CUDA kernels are compiled for the machine's GPU. Where there is none they are left out, unless
# CUDAARCHS names architectures (CUDAARCHS=90-real make test): compiling takes several minutes for each.
DEVELOP_CUDAARCHS := $(or $(CUDAARCHS),$(shell nvidia-smi -L >/dev/null 2>&1 && echo native))
ifneq ($(shell command -v ccache 2>/dev/null),)
  export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
  export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
endif

# `make dist` builds what its arguments ask for, whatever is there; `make pythons` tries what is there,
# unless a source is newer.
DIST_NEEDS := .venv/installed-dist .venv/build-requirements
define BUILD_DIST
PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python .ci/make_dist.py $(DIST_ARGS)
touch dist/.built
endef

# --- Tests ---

# Each test has the mark of its tier; tests without one belong to `make test`. Workers divide the
# tests evenly. Only slow tests are divided by files, because those of a file share what they build.
PYTEST := $(BIN)/python .ci/run_tests.py $(TEST_ARGS)

# There are wheels of XLA's compiler for GPUs for Linux alone.
GPU_COMPILER := $(if $(filter Linux,$(shell uname -s)),.venv/gpu-compiler)

.PHONY: figures help demo quick test slow check pythons venv lint benchmark gpu dist image clean force
# The targets write to the same folders.
.NOTPARALLEL:

##   make demo        train a network of fused blocks on handwritten digits, next to plain Flax
demo: .venv/installed-demo .venv/module
	$(BIN)/python examples/digits/train.py $(DEMO_ARGS)

# Without the names, pytest would import all files to find that most have no such tests.
QUICK_FILES = $(shell grep -rl --include='test_*.py' 'mark\.quick' tests)

##   make quick       operators, gradients, transformations, bad input, layers
quick: .venv/installed-test .venv/module
	$(PYTEST) -m "quick and not slow" --dist=worksteal $(QUICK_FILES)

##   make test        everything that a change can break, except the slow tests
test: .venv/installed-test .venv/module
	$(PYTEST) -m "not (slow or large or gpu)" --dist=worksteal

# Files are begun in the order in which tests/conftest.py has them.
slow: .venv/installed-test .venv/module $(GPU_COMPILER)
	$(PYTEST) -m "$(SLOW_TESTS)" --dist=loadfile --no-loadscope-reorder

##   make check       everything: lint, make test, sanitizers, emulated grids, other Pythons, examples
# Multiplies the number of examples in property tests.
check: export JAX_BNAR_TEST_EXAMPLES ?= 10
check: lint test slow pythons

pythons: dist/.built
	.ci/version_matrix $(VERSION_MATRIX_ARGS)

##   make lint        formatting, lint, types, imports between rooms, unused code, Dockerfile
lint: .venv/installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/vulture
	$(BIN)/hadolint Dockerfile
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)

##   make benchmark   the 53 BatchNorm sites of ResNet-50 against Flax (and PyTorch, if installed)
benchmark: .venv/installed-bench .venv/module
	$(BIN)/python -m benchmarks.sites.launch -- $(BENCHMARK_ARGS)

##   make figures     the pictures of README and docs, from benchmarks/results
# What the CUDA kernels should take follows from the sources, so it is written anew.
figures: .venv/installed-bench .venv/module
	$(BIN)/python -m benchmarks.gpu.model.write
	$(BIN)/python -m benchmarks.figures

##   make gpu         on a machine with an NVIDIA GPU: build, test and measure the CUDA kernels
# The machine may be offline, so this uses what is installed: CUDA 13 with nvcc, jax with its CUDA
# plugin, flax, optax, nanobind, scikit-build-core, cmake, ninja, pytest, pytest-timeout,
# pytest-xdist and hypothesis, plus torch and torchvision for the peers.
gpu:
	$(PYTHON) -m benchmarks.gpu $(GPU_ARGS)

##   make dist        build sdist and wheels into dist/, and check them
# The CUDA wheels are for all architectures, unless CUDAARCHS names some. --cuda on installs nvcc.
dist: $(DIST_NEEDS)
	$(BUILD_DIST)

##   make image       the image of Dockerfile, whose doctor must find it healthy
# Of the image with CUDA, only the kernels are built, because JAX's plugin for it has gigabytes.
image:
	$(DOCKER) build --tag jax_bnar .
	$(DOCKER) run --rm jax_bnar
	$(DOCKER) build --target build-cuda13 --build-arg CUDAARCHS=$(or $(CUDAARCHS),90-real) .

##   make venv        create an empty .venv
venv: .venv/created

##   make clean       remove .venv, build, demo_output and the caches of the tools
clean:
	rm -rf .venv build demo_output .pytest_cache .ruff_cache .hypothesis

help:
	@sed -n 's/^## //p' $(firstword $(MAKEFILE_LIST))

dist/.built: $(DIST_NEEDS) $(DIST_INPUTS)
	$(BUILD_DIST)

.venv/created:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	  "jax_bnar needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + \
	  "; name another, for example: make PYTHON=python3.12 $(or $(firstword $(MAKECMDGOALS)),help)")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

# The headers of the oldest jaxlib have a folder to themselves, because the tests may run with a
# newer jaxlib.
.venv/build-requirements: pyproject.toml .ci/requirements.py | .venv/created
	rm -rf .venv/jaxlib-headers
	$(BIN)/python .ci/requirements.py build-tools >$@.txt
	$(BIN)/python -m pip install --quiet --requirement $@.txt
	$(BIN)/python .ci/requirements.py build-headers >$@.txt
	$(BIN)/python -m pip install --quiet --no-deps --target .venv/jaxlib-headers --requirement $@.txt
	touch $@

# Without build isolation the include paths stay the same from build to build, so only what depends
# on a touched source is recompiled. `pip install .` uses a different build folder.
# .venv/module holds the architectures of the build; other ones are a reason to build, too.
ifneq ($(shell cat .venv/module 2>/dev/null),$(DEVELOP_CUDAARCHS))
.venv/module: force
endif
.venv/module: .venv/build-requirements $(BUILD_INPUTS)
	@echo '$(DEVELOP_CUDAARCHS)' >$@.began
	@echo "Compiling the native modules: CPU kernels (three to nine minutes of one core)," \
	  "$(if $(DEVELOP_CUDAARCHS),CUDA kernels for $(DEVELOP_CUDAARCHS) if nvcc is there (several minutes each),no CUDA kernels: no GPU here and CUDAARCHS is not set)"
	$(if $(DEVELOP_CUDAARCHS),CUDAARCHS='$(DEVELOP_CUDAARCHS)') \
	  PYTHONPATH="$(CURDIR)/.venv/jaxlib-headers" PATH="$(CURDIR)/$(BIN):$$PATH" \
	  $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps \
	  --config-settings=build-dir=build/develop --editable .
	mv $@.began $@  # With the time of the beginning, so that an edit during the build counts.

# Installs packages only: the native module does not depend on them.
.venv/installed-%: pyproject.toml .ci/requirements.py | .venv/created
	$(BIN)/python .ci/requirements.py '$(or $(EXTRAS_$*),$*)' >$@.txt
	$(BIN)/python -m pip install --quiet --requirement $@.txt
	touch $@ $(PARTS_$*:%=.venv/installed-%)

# It has a folder to itself, because JAX would look for CUDA in every process that finds the plugin,
# and complain. It must have the version of the JAX that is installed.
.venv/gpu-compiler: .venv/installed-test
	rm -rf $@
	$(BIN)/python -m pip install --quiet --target $@ 'nvidia-cuda-nvcc==13.*' \
	  jax-cuda13-plugin==$$($(BIN)/python -c 'import jax; print(jax.__version__)')
	touch $@

# --- Documentation ---

.PHONY: docs
##   make docs        build the pages of docs/ into build/docs; a warning is an error
docs: .venv/installed-docs
	$(BIN)/python -m mkdocs build --strict
