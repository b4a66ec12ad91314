# `make` lists the targets; `make test` needs nothing but python3: it builds its own environment first.
SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS   += --no-builtin-rules

PYTHON  ?= python3## the Python of a new .venv
WORKERS ?= 2## processes side by side
TIMEOUT ?= 300## seconds per test
SCALE   ?=## of reproduce-*: testbed, real (SmolLM2-135M) or paper
DATA    ?=## of reproduce-*: rows of the real scale, a folder (experiments/real_data.yaml) or hub
ARGS    ?=## further words for the command: pytest's options, --smoke of reproduce-*
DEMO    ?= 20## articles of the demo; below 20 there are no intervals

VENV  := .venv
PEERS := .venv-peers
BIN   := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)
# A CUDA build of torch brings a Triton of its own, so this is no line of constraints.txt: pip would find the two at odds.
TRITON_VERSION := 3.9.0
TRITON := build/triton-$(TRITON_VERSION)
OPENVINO_VERSION := 2026.4.1
OPENVINO := build/openvino-$(OPENVINO_VERSION)
LLAMA_CPP_VERSION := 2026.10.11549
LLAMA_CPP := build/xllamacpp-$(LLAMA_CPP_VERSION)

# One thread per worker (two workers on two cores beat two workers fighting over them), no waiting for an unreachable hub,
# and what one process has compiled is there for the next: tests begin many.
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# worksteal: a worker takes neighbouring tests, so that what a module or a cache makes once is made by one of them.
PYTEST   := $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --timeout=$(TIMEOUT)

# Without SCALE: real where its model and DATA are there, else testbed.
REPRODUCE = $(BIN)/python -m experiments.reproduce $(if $(SCALE),--scale $(SCALE)) $(if $(DATA),--data $(DATA))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup dist docs demo testbed smoke frozen mutations test test-slow test-real test-all oldest newest lint typecheck size format check peers bench bench-real bench-gpu gpu-compile gpu-first triton openvino test-openvino llama-cpp test-llama-cpp reproduce-NAME reproduce-all reproduce-real reproduce-smoke report notebooks audit clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-zA-Z-]+:.*## /{printf "  %-15s %s\n", $$1, $$2}' Makefile
	@echo 'Variables, as in make demo DEMO=40:'
	@awk -F ' *[?]= *| *## ' '/^[A-Z]+ *[?]=.*## /{printf "  %-15s %s\n", $$1 "=" $$2, $$3}' Makefile

setup: $(VENV)/.stamp ## build .venv with the pinned versions and fetch the default model (once, and again when they change)

# torch comes first and by exact version: resolved together with the rest, pip may take another build of several GB.
$(VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"$(PYTHON) is Python {v[0]}.{v[1]}, the pins in constraints.txt need 3.11 or later; run: make setup PYTHON=python3.12")'
	@test -x $(BIN)/pip || { echo 'creating $(VENV)'; $(PYTHON) -m venv --clear $(VENV); }
	@echo 'installing torch $(TORCH) (about a minute; without CUDA 200 MB)'
	@$(BIN)/pip install --quiet torch==$(TORCH)
	@echo 'installing kvexp and its tools (constraints.txt; about three minutes, without a word)'
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,docs,eval,benchmarks,scale]'
	@$(BIN)/kvexp fetch || echo 'no weights were fetched: kvexp fetch tries again; without them: model=testbed_rope task=testbed_summary'
	@touch $@

DEMO_RUNS = $(BIN)/python run.py -m method=keyformer,h2o,a2sf kv_ratio=0.2,0.5,0.7 limit=$(DEMO) task.max_new_tokens=64 outputs_dir=outputs/demo

demo: $(VENV)/.stamp ## three methods at three budgets on a real model: a table and two figures (outputs/demo/kl.png, demo.png)
	@$(BIN)/kvexp fetch smollm2_135m
	@$(DEMO_RUNS) --dry-run | tail -n 1
	@$(DEMO_RUNS)
	@$(BIN)/kvexp results outputs/demo --view divergence --plot outputs/demo/kl.png > /dev/null
	@$(BIN)/kvexp results outputs/demo --plot outputs/demo/demo.png > /dev/null

testbed: $(VENV)/.stamp ## train the testbed's four models from scratch, then measure them (under 4 hours on 2 cores)
	@$(BIN)/python -m experiments.studies.testbed train
	@$(BIN)/python -m experiments.testbed

smoke: $(VENV)/.stamp ## the smallest run that goes through every part
	@$(BIN)/python run.py model=testbed_rope task=testbed_summary limit=1 outputs_dir=outputs/smoke

test: $(VENV)/.stamp ## the tests to run before every commit (not slow, real)
	@$(PYTEST) -m 'not slow and not real' $(ARGS)

test-slow: $(VENV)/.stamp ## only the tests marked slow
	@$(PYTEST) --timeout=0 -m 'slow' $(ARGS)

test-real: $(VENV)/.stamp ## only the tests of the fetched real model; they skip without it
	@$(PYTEST) -m 'real and not slow' $(ARGS)

frozen: $(VENV)/.stamp ## hold rows, kept sets, divergences, tables and identities of small runs against a recording (about 15 minutes)
	@$(BIN)/python tests/frozen compare

mutations: $(VENV)/.stamp ## break one mechanism at a time in a copy: tests of `make test` must notice each (half an hour; ARGS=how names begin)
	@$(BIN)/python tests/mutations.py $(ARGS)

test-all: $(VENV)/.stamp ## every test (those that lack a GPU or exported peer numbers skip)
	@$(PYTEST) --timeout=0 $(ARGS)

# Families against Hugging Face, cache, attention function, generation, files of models, with another transformers beside .venv,
# which is found first; torch stays. Without lm-eval, whose own dependencies are newer (data_dir). Tests name a model's
# argument as the older ones do, of which the newest warns.
VERSIONS := tests/hf/test_identity.py tests/hf/test_patch.py tests/hf/test_gguf.py tests/hf/test_checkpoints.py tests/generate/test_generation.py tests/core/test_layer.py
oldest: build/oldest/.stamp ## these tests with the oldest versions that pyproject.toml allows (constraints-oldest.txt)
newest: build/newest/.stamp ## these tests with the newest transformers that pyproject.toml allows
oldest newest:
	@PYTHONPATH=build/$@ $(BIN)/python -c 'import transformers; print("transformers", transformers.__version__)'
	@PYTHONPATH=build/$@ $(PYTEST) -W ignore::FutureWarning -m 'not slow and not real' $(VERSIONS) -k 'not data_dir and not lm_eval' $(ARGS)

build/oldest/.stamp: WANTED := -r constraints-oldest.txt
build/oldest/.stamp: constraints-oldest.txt
build/newest/.stamp: WANTED := 'transformers>=5.7,<6'
build/%/.stamp: $(VENV)/.stamp
	@echo "installing $(WANTED) into build/$*"
	@rm -rf build/$*
	@$(BIN)/pip install --quiet --no-deps --target build/$* $(WANTED)
	@touch $@

lint: $(VENV)/.stamp ## ruff check, ruff format --check, mypy, size
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory typecheck size

size: $(VENV)/.stamp ## code lines of every room against its ceiling (tests/size.toml)
	@$(BIN)/python tests/size.py

typecheck: $(VENV)/.stamp ## mypy --strict on all of kvexp
	@$(BIN)/mypy kvexp

format: $(VENV)/.stamp ## rewrite the code the way lint wants it
	@$(BIN)/ruff check --fix --quiet --exit-zero .
	@$(BIN)/ruff format .

check: lint audit test ## lint, audit, then test

audit: $(VENV)/.stamp ## known vulnerabilities of the pinned packages (one line where nobody can be asked)
	@.ci/audit $(BIN)/python

# Peers live apart: kvpress 0.5.5 needs transformers < 5.3, kvexp needs >= 5.4.
peers: $(PEERS)/.stamp ## an environment with kvpress in it, for benchmarks.peers

$(PEERS)/.stamp: constraints.txt
	@test -x $(PEERS)/bin/pip || { echo 'creating $(PEERS)'; $(PYTHON) -m venv --clear $(PEERS); }
	@echo 'installing torch $(TORCH) and kvpress 0.5.5'
	@$(PEERS)/bin/pip install --quiet torch==$(TORCH)
	@$(PEERS)/bin/pip install --quiet torch==$(TORCH) kvpress==0.5.5
	@touch $@

bench: $(VENV)/.stamp ## measure speed and memory on this CPU, as ratios (under 10 minutes on 2 free cores; goes on where it was)
	@$(BIN)/python -m benchmarks.suite cpu $(ARGS)

bench-real: $(VENV)/.stamp ## the same with the fetched real model (under 15 minutes on 2 free cores; ARGS=--all: 50; goes on where it was)
	@$(BIN)/python -m benchmarks.suite real $(ARGS)

bench-gpu: ## the same on a GPU, with torch and transformers alone: commands of at most 10 minutes (ARGS='--only NAME')
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.suite gpu $(ARGS)

gpu-first: ## the first run on a GPU: tests and times, the most valuable first, and one report (gpu_report.md; at most 12 minutes)
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu_first $(ARGS)

# Triton compiles for GPUs that are not there. Its gigabyte lies beside .venv, not in it: with it the kernels' tests would run
# (interpreted, minutes) in every `make test`.
gpu-compile: $(VENV)/.stamp $(TRITON)/.stamp ## the Triton kernels: interpreted against the truth, and as machine code of three GPU generations (no GPU needed)
	@PYTHONPATH=$(TRITON) $(PYTEST) tests/core/test_triton.py
	@PYTHONPATH=$(TRITON) TRITON_CACHE_DIR=build/triton-cache $(BIN)/python -m benchmarks.machine_code --workers $(WORKERS) $(ARGS)

triton: $(TRITON)/.stamp ## fetch the pinned Triton into build/ (gpu-compile does it by itself)

$(TRITON)/.stamp: $(VENV)/.stamp
	@echo 'installing triton $(TRITON_VERSION) into $(TRITON)'
	@$(BIN)/pip install --quiet --no-deps --target $(TRITON) triton==$(TRITON_VERSION)
	@touch $@

test-openvino: $(VENV)/.stamp $(OPENVINO)/.stamp ## OpenVINO GenAI against kvexp: weights, full cache, evictions (needs 200 MB of it)
	@PYTHONPATH=$(OPENVINO) $(PYTEST) tests/generate/test_openvino.py tests/run/test_engine.py tests/experiments/test_engines_study.py $(ARGS)

openvino: $(OPENVINO)/.stamp ## fetch the pinned OpenVINO GenAI into build/ (test-openvino does it by itself)

$(OPENVINO)/.stamp: $(VENV)/.stamp
	@echo 'installing openvino-genai $(OPENVINO_VERSION) into $(OPENVINO)'
	@$(BIN)/pip install --quiet --no-deps --target $(OPENVINO) openvino==$(OPENVINO_VERSION) openvino-tokenizers==$(OPENVINO_VERSION).0 openvino-genai==$(OPENVINO_VERSION).0
	@touch $@

test-llama-cpp: $(VENV)/.stamp $(LLAMA_CPP)/.stamp ## llama.cpp against transformers and kvexp: full cache, formats, evictions; kvexp gate on llama-server (needs 34 MB of it)
	@PYTHONPATH=$(LLAMA_CPP) $(PYTEST) -m 'not slow' tests/generate/test_llama_cpp.py tests/run/test_engine_llama_cpp.py tests/gate/test_gate_real.py $(ARGS)

llama-cpp: $(LLAMA_CPP)/.stamp ## fetch the pinned xllamacpp into build/ (test-llama-cpp does it by itself)

$(LLAMA_CPP)/.stamp: $(VENV)/.stamp
	@echo 'installing xllamacpp $(LLAMA_CPP_VERSION) into $(LLAMA_CPP)'
	@$(BIN)/pip install --quiet --no-deps --target $(LLAMA_CPP) xllamacpp==$(LLAMA_CPP_VERSION)
	@touch $@

reproduce-all: $(VENV)/.stamp ## every figure and table of the papers (SCALE=testbed|real|paper)
	@$(REPRODUCE) all --workers $(WORKERS) $(ARGS)

reproduce-real: SCALE := real
reproduce-real: $(VENV)/.stamp ## those that SmolLM2-135M can show, on the rows of DATA=FOLDER or DATA=hub; none: kvexp's own articles
	@$(REPRODUCE) all --workers $(WORKERS) $(ARGS)

reproduce-smoke: $(VENV)/.stamp ## all with one or two examples, under outputs/smoke: does it run? The real scale too where its model is
	@$(BIN)/python -m experiments.reproduce all --smoke --scale testbed --workers $(WORKERS) $(ARGS)
	@if $(BIN)/python -m experiments.lib.real_scale; then \
	    $(BIN)/python -m experiments.reproduce all --smoke --scale real --workers $(WORKERS) $(ARGS); \
	fi

reproduce-NAME: ## one of them, such as reproduce-keyformer_fig7: says how long it takes; into outputs/reproduce
	@echo 'NAME stands for an exhibit of experiments/README.md: make reproduce-keyformer_fig7'

reproduce-%: $(VENV)/.stamp
	@$(REPRODUCE) $* $(ARGS)

report: $(VENV)/.stamp ## one HTML file of everything under outputs/ (ARGS='OUTPUTS_DIR FILE')
	@$(BIN)/kvexp report $(ARGS)

dist: $(VENV)/.stamp ## source archive and wheel in dist/, as they would be published; the wheel is made of the archive
	@$(BIN)/python -m build

docs: $(VENV)/.stamp ## the documentation as a site in build/site; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

notebooks: $(VENV)/.stamp ## execute the three notebooks with two examples each: do they run?
	@$(PYTEST) --timeout=0 tests/experiments/test_notebooks.py $(ARGS)

clean: ## remove environments and caches (outputs/ stays)
	@rm -rf $(VENV) $(PEERS) build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
