# SPDX-License-Identifier: Apache-2.0
# The words a person and CI share. `make help` lists them. Every target that runs something first
# makes .venv and installs what is missing, so `make demo` and `make test` work in a fresh clone.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
BENCH ?= offload
BENCH_ARGS ?=

# The stamp's name holds a checksum of what decides the environment's content, compiled libraries
# included. A time stamp would not do: checking out another branch and back would ask for a new
# installation, and for a network.
DECIDES := pyproject.toml constraints.txt setup.py \
	$(wildcard kernels/cpu/*.cpp kernels/cpu/*.h tiers/native/*.cpp)
STAMP := $(VENV)/.installed-$(shell cat $(DECIDES) | cksum | tr ' ' '-')

# No build isolation: an isolated build downloads setuptools again, even when nothing else is
# missing. No compilation: Python compiles what is imported, a small part of what is installed.
PIP_INSTALL := $(BIN)/pip install --prefer-binary --no-compile -c constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# What is imported is compiled once and kept. Where that is forbidden, each of the many processes
# that the tests start compiles torch anew, which takes it five seconds.
unexport PYTHONDONTWRITEBYTECODE
# What setup.py has compiled once it takes from here; the tests build wheels.
export KEEP_OBJECTS_IN := $(CURDIR)/build/objects

# NVIDIA's library and headers, 2.4 MB: tests read them, and skip where they are not to be had. Torch
# brings its own where it is built for CUDA.
CUDA_RUNTIME := nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88

# A Triton beside that of the environment, which engines with an older torch bring.
OTHER_TRITON := build/tritons/3.6.0

PACKAGES := benchmarks connector engine kernels proto tiers

.PHONY: help env demo test tritons test-vllm check lint format names proto pages bench dist clean
.DEFAULT_GOAL := help

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 10

env: $(STAMP) ## .venv, with everything that tests need

demo: $(STAMP) ## the main job at work: one prompt, cold and out of every tier
	$(BIN)/stratakv bench offload --quick --out build/demo

# As many processes as processors. A third saves three minutes on the clock, since a quarter of the
# time of the tests is waiting, and takes fifty processor seconds. What each of them gets is up to
# tests/alone_at_the_end.py, which keeps the tests that measure time for the end.
test: $(STAMP) ## the whole test suite; PYTEST_ARGS adds options
	$(BIN)/pytest -n 2 $(PYTEST_ARGS)

tritons: $(OTHER_TRITON) ## another Triton, by which tests compile too where OTHER_TRITONS names its folder

$(OTHER_TRITON): $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python tools/install_dependencies.py --into $@.part triton==$(notdir $@) || { rm -rf $@.part; \
	  $(BIN)/pip install --no-compile --quiet --no-deps --target $@.part triton==$(notdir $@); }
	mv $@.part $@

# docs/vllm.md says how to make the environment whose Python this takes. One engine at a time.
test-vllm: $(STAMP) ## our tiers below a real vLLM; STRATAKV_VLLM_PYTHON=its Python
	@test -x "$(STRATAKV_VLLM_PYTHON)" || { \
	  echo "make test-vllm needs STRATAKV_VLLM_PYTHON=PYTHON of an environment with vLLM; see docs/vllm.md" >&2; \
	  exit 1; }
	STRATAKV_VLLM_PYTHON="$(STRATAKV_VLLM_PYTHON)" $(BIN)/pytest tests/connector/vllm $(PYTEST_ARGS)

check: lint ## lint, then the quick tests: run it before every commit
	$(BIN)/pytest -q -m "not slow" -n 3 $(PYTEST_ARGS)

lint: $(STAMP) names ## ruff, its formatter, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/names $(BIN)/mypy -p stratakv

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Type checkers and editors look for a folder named stratakv. The repository root has another name
# and holds tests too, so this makes a folder of links to the packages and nothing else.
names: ## links in build/names, for type checkers and editors
	@mkdir -p build/names/stratakv
	@ln -sfn $(foreach name,__init__.py py.typed $(PACKAGES),../../../$(name)) build/names/stratakv/

proto: $(STAMP) ## generate the code of proto/v1/*.proto again
	$(BIN)/python tools/generate_proto.py

pages: $(STAMP) ## write the tables of flags in docs/commands from the code
	$(BIN)/python tools/command_pages.py

bench: $(STAMP) ## a benchmark in its full form; BENCH=name, BENCH_ARGS=options
	$(BIN)/stratakv bench $(BENCH) --out build/bench/$(BENCH) $(BENCH_ARGS)

# The wheel is made of the source distribution and not of the tree, so that both are known to work.
dist: $(STAMP) ## source distribution and wheel, in dist/
	rm -rf dist stratakv.egg-info && mkdir -p build dist
	$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")' >build/sdist.log
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@ls -l dist

clean: ## remove what was built; .venv stays
	rm -rf build dist stratakv.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

# One line says what goes on, and what pip says goes into a file, whose end is shown if it fails. In a
# new environment the library is compiled while pip downloads, and pip finds its objects. What uv has
# installed pip need not look at again.
INSTALL_LOG := build/install.log
define INSTALL
set -e
test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
$(PIP_INSTALL) setuptools
test -x $(BIN)/stratakv || $(BIN)/python setup.py -q build_ext --build-lib build/library >build/library.log 2>&1 &
others=
$(BIN)/python tools/install_dependencies.py test && others=--no-deps
$(PIP_INSTALL) $$others --no-build-isolation -e '.[test]'
$(BIN)/pip show --quiet nvidia-cuda-runtime 2>/dev/null \
  || $(PIP_INSTALL) --quiet --retries 0 --timeout 20 --no-deps $(CUDA_RUNTIME) \
  || echo "without NVIDIA's runtime: tests/connector/device/test_cudart.py will skip"
endef
export INSTALL

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "StrataKV needs Python 3.11 or newer and $(PYTHON) is not; name one: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@mkdir -p build
	@echo "installing StrataKV and what its tests need into $(VENV), which takes minutes; what pip says: $(INSTALL_LOG)" >&2
	@sh -c "$$INSTALL" >$(INSTALL_LOG) 2>&1 || { \
	  tail -n 20 $(INSTALL_LOG) >&2; \
	  echo "the installation failed; all that was said is in $(INSTALL_LOG)" >&2; \
	  exit 1; }
	@rm -f $(VENV)/.installed-*
	@touch $@
