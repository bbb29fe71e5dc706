# `make demo` and `make test` create what they need, on a machine with or without a GPU.
#
# By default everything runs in .venv, which is created on demand. If there are GPUs and python3 has torch for CUDA, .venv
# uses that torch (outer.pth, because python3 may be part of a virtual environment); otherwise it gets torch $(TORCH). To
# use an interpreter that has all packages, for example without a package index: `make test PYTHON=python3`.

SHELL := /bin/bash
TORCH ?= 2.13.0
# Wheels of torch without CUDA, for machines without GPUs. Not used if it does not answer within 5 seconds.
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Kernels are compiled with the device library of its wheel. pip may report that torch needs another version.
NVSHMEM ?= 3.7.2

# Otherwise each of the hundreds of processes that tests start would compile torch's modules again, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
READY := $(VENV)/.ready
PYTHON ?= $(VENV)/bin/python
ifeq ($(PYTHON),$(VENV)/bin/python)
NEEDS := $(READY)
NEEDS_OF_DOCS := $(VENV)/.ready-docs
endif

.PHONY: help demo test gpu-test sanitize bench host lint format typecheck docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small MoE on all GPUs, or on two CPU processes, and check it against a dense model"
	@echo "make test       the tests that need no GPU (and what a GPU adds, where there is one)"
	@echo "make gpu-test   tests/gpu on 1, 2 and 4 ranks and some on up to 72, which may share GPUs, and both demos; RANKS=2: on 2 alone"
	@echo "make sanitize   small GPU tests under memcheck, racecheck, initcheck and synccheck"
	@echo "make bench      throughput and latency of dispatch and combine on all visible GPUs"
	@echo "make host       doctor, benchmarks and GPU tests on all GPUs of this host in 9 minutes, with one JSON file"
	@echo "make lint       ruff and codespell;  make format: let ruff rewrite;  make typecheck: mypy"
	@echo "make docs       the documentation as a site, in build/site; a broken link is an error"
	@echo "make clean      remove .venv and the tools' caches"

$(READY): pyproject.toml Makefile
	@set -e; \
	if command -v nvidia-smi >/dev/null && cuda=$$(python3 -c 'import torch; print(torch.version.cuda.split(".")[0])' 2>/dev/null); then \
	  echo "== $(VENV): on top of python3 and its torch (CUDA $$cuda)"; \
	  python3 -m venv --system-site-packages $(VENV); \
	  python3 -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$$(echo $(VENV)/lib/python3*/site-packages)/outer.pth"; \
	  $(VENV)/bin/python -m pip install -qq -e ".[dev,cu$$cuda]"; \
	else \
	  python3 -m venv $(VENV); \
	  index=; size="up to 3 GB, with CUDA libraries"; \
	  if ! command -v nvidia-smi >/dev/null && python3 -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=5)' $(CPU_INDEX) 2>/dev/null; then \
	    index="--index-url $(CPU_INDEX)"; size="200 MB, for CPUs only"; \
	  fi; \
	  echo "== $(VENV): downloading torch $(TORCH) ($$size), once"; \
	  $(VENV)/bin/python -m pip install --no-compile $$index "torch==$(TORCH)"; \
	  echo "== $(VENV): the development tools (about 500 MB, a few minutes, once)"; \
	  $(VENV)/bin/python -m pip install -qq --no-compile -e ".[dev]"; \
	  $(VENV)/bin/python -m pip install -qq --no-compile --no-deps "nvidia-nvshmem-cu13==$(NVSHMEM)"; \
	fi
	@touch $@

demo: $(NEEDS)
	$(PYTHON) -m ep_ops demo $(ARGS)

# Two runs, because tests/gpu changes torch's settings for its whole process. (Exit code 5: ARGS selects none of its
# tests.) The second run tests three files at a time, longest files first (tests/conftest.py). Some tests wait, so two
# cores are busy; each further process takes 15 s of CPU time to import everything.
test: $(NEEDS)
	$(PYTHON) -m pytest tests/gpu $(ARGS) || [ $$? -eq 5 ]
	$(PYTHON) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# tests/gpu on 1, 2 and 4 ranks, tests/gpu/test_many.py on up to 72, ranks that die, and both demos; RANKS=2 or RANKS="1 2"
# runs tests/gpu on these numbers of ranks alone. Ranks share GPUs if there are fewer. ARGS: options of tests/gpu/run.py.
gpu-test: $(NEEDS)
	$(PYTHON) tests/gpu/run.py --ranks "$(RANKS)" $(ARGS)
ifndef RANKS
	$(PYTHON) -m ep_ops demo
	$(PYTHON) -m ep_ops demo --decode
endif

# Small GPU tests of every family of kernels on 1 and 2 ranks under compute-sanitizer's tools. ARGS: of sanitize.py.
sanitize: $(NEEDS)
	$(PYTHON) tests/gpu/sanitize.py $(ARGS)

bench: $(NEEDS)
	$(PYTHON) -m ep_ops bench throughput $(ARGS)
	$(PYTHON) -m ep_ops bench latency $(ARGS)

# ARGS: of benchmarks/host.py.
host: $(NEEDS)
	$(PYTHON) benchmarks/host.py --out build/host.json $(ARGS)

lint: $(NEEDS)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m codespell_lib

format: $(NEEDS)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

typecheck: $(NEEDS)
	$(PYTHON) -m mypy

$(VENV)/.ready-docs: $(READY)
	$(PYTHON) -m pip install -qq -e ".[docs]"
	@touch $@

# NO_MKDOCS_2_WARNING: mkdocs-material's note on mkdocs 2, which pyproject.toml excludes.
docs: $(NEEDS_OF_DOCS)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
