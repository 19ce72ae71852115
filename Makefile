# `make train` and `make test` each do all of their own set-up. `make help` lists the rest.

.DEFAULT_GOAL := help

# --- set-up --------------------------------------------------------------------------------------------------

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)
PINS := configs/requirements.txt
COLOSSALAI_PINS := configs/requirements-colossalai.txt
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(PINS)
export DS_BUILD_OPS := 0

# --- the training job ----------------------------------------------------------------------------------------

NAME ?= stdlib
RUN := runs/$(NAME)
CONFIG ?= configs/llama_2_stages_1x2x2.json
MODEL ?=
DATA ?=
STEPS ?=
RANKS ?= 8
SEQUENCE ?= 256
SAVE_EVERY ?=
KEEP_LAST ?=
RESUME ?=
TEXT ?=
FINETUNE_CONFIG := $(if $(filter command line,$(origin CONFIG)),$(CONFIG),configs/lora_1x2x2.json)
BOOSTER_RANKS := $(if $(filter command line,$(origin RANKS)),$(RANKS),4)
BOOSTER_CONFIG := $(if $(filter command line,$(origin CONFIG)),$(CONFIG),configs/colossalai_2_stages_1x1x2.yaml)

# Without an accelerator for each rank, the ranks are CPU processes.
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
ifeq ($(shell test "$(GPUS)" -ge "$(RANKS)" && echo enough),)
export DS_ACCELERATOR ?= cpu
endif
export OMP_NUM_THREADS ?= 1
FREE_PORT := $(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'

.PHONY: help install train finetune colossalai test test-ci test-slow test-versions gpu bench docs site lint clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/installed ## Make .venv with pinned dependencies and Cuboid itself.

$(VENV)/installed: $(PINS) setup.py
	@test -n "$(PYTHON)" || { echo "make install: found no Python of version 3.11 or later, which transformers 5" \
		"needs; name one: make install PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "installing into $(VENV): PyTorch …"
	@$(INSTALL) torch
	@echo "installing into $(VENV): everything else …"
	@# DeepSpeed's set-up imports torch and setuptools from the environment, so it is built in it, last.
	@grep -v '^deepspeed==' $(PINS) > $(VENV)/all-but-deepspeed.txt
	@$(INSTALL) --requirement $(VENV)/all-but-deepspeed.txt
	@$(INSTALL) --no-build-isolation deepspeed
	@$(INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@

# ColossalAI's own requirements would bring other versions of torch and transformers, so none of them is followed.
$(VENV)/colossalai: $(VENV)/installed $(COLOSSALAI_PINS)
	@echo "installing into $(VENV): ColossalAI …"
	@$(INSTALL) --no-build-isolation --no-deps --requirement $(COLOSSALAI_PINS)
	@$(BIN)/python -W ignore -c "import colossalai.booster"
	@touch $@

train: install ## Train: MODEL=… DATA=… CONFIG=… STEPS=… NAME=… RANKS=… SEQUENCE=… SAVE_EVERY=… KEEP_LAST=… RESUME=1 (or auto)
	@# With RESUME=auto, only a run that has no finished checkpoint yet is prepared.
	@$(if $(filter-out auto,$(RESUME)),true,$(if $(RESUME),ls "$(RUN)"/checkpoints/*/manifest.json 2>/dev/null | grep -qv '\.incomplete/' || )\
		$(BIN)/python -m cuboid.cli prepare --out "$(RUN)" \
		$(if $(MODEL),--model "$(MODEL)") $(if $(DATA),--data "$(DATA)"))
	@# The launcher is shielded from Ctrl-C, which the ranks answer with a checkpoint.
	@exec $(BIN)/python -P plugin/cuboid/failures/shielded_launcher.py \
		$(BIN)/deepspeed --quiet --num_accelerators $(RANKS) --master_port "$$($(FREE_PORT))" --module cuboid.cli train \
		--model "$(or $(MODEL),$(RUN)/start)" --data "$(RUN)/tokens" --config "$(CONFIG)" --out "$(RUN)" \
		--sequence-length $(SEQUENCE) $(if $(STEPS),--steps $(STEPS)) $(if $(SAVE_EVERY),--save-every $(SAVE_EVERY)) \
		$(if $(KEEP_LAST),--keep-last $(KEEP_LAST)) $(if $(RESUME),$(if $(filter 1 yes true,$(RESUME)),--resume,$(if $(filter auto,$(RESUME)),--resume auto,--resume-from "$(RESUME)")))
	@$(BIN)/python docs/examples/evaluate.py "$(RUN)"

finetune: install ## Fine-tune with LoRA on 4 ranks, and check it with plain PEFT: MODEL=… TEXT=… CONFIG=… STEPS=…
	@# The base is the model of `make train`, if it has run; else one that is trained for a minute.
	@test -n "$(MODEL)" || test -f runs/stdlib/model/config.json || test -f runs/finetune/base/model/config.json || \
		$(MAKE) --no-print-directory train NAME=finetune/base RANKS=1 SEQUENCE=128 STEPS=60 RESUME= OMP_NUM_THREADS=2 \
		CONFIG=configs/llama_1_rank.json
	@for model in $(if $(MODEL),"$(MODEL)",runs/stdlib/model runs/finetune/base/model); do \
		test -f "$$model/config.json" && break; done; \
	PYTHONWARNINGS=ignore::FutureWarning $(BIN)/deepspeed --quiet --num_accelerators 4 --master_port "$$($(FREE_PORT))" \
		docs/examples/adapt.py "$$model" runs/finetune --config "$(FINETUNE_CONFIG)" $(if $(TEXT),--text "$(TEXT)") \
		$(if $(STEPS),--steps $(STEPS))
	@$(BIN)/python -W ignore::FutureWarning docs/examples/check_adapter.py runs/finetune

colossalai: $(VENV)/colossalai ## The same under ColossalAI's Booster, on 4 ranks: MODEL=… TEXT=… CONFIG=… RANKS=…
	@test -n "$(MODEL)" || test -d runs/colossalai/start || $(BIN)/python -m cuboid.cli prepare --out runs/colossalai
	@PATH="$(abspath $(BIN)):$$PATH" PYTHONWARNINGS="ignore:Please install:UserWarning" $(BIN)/colossalai run --nproc_per_node $(BOOSTER_RANKS) \
		--master_port "$$($(FREE_PORT))" docs/examples/booster.py "$(or $(MODEL),runs/colossalai/start)" \
		"$(or $(TEXT),$$($(BIN)/python -c 'import argparse; print(argparse.__file__)'))" runs/colossalai \
		"$(BOOSTER_CONFIG)"
	@$(BIN)/python docs/examples/evaluate.py runs/colossalai

# One more than the cores of a small machine: a quarter of the time, a process waits for ranks that it has started.
TEST_PROCESSES ?= 3

# Each file stays in one process, which keeps its pool of ranks.
IN_PROCESSES = -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: install ## Run the tests that show the most in the least time, in TEST_PROCESSES=3 processes.
	@$(MAKE) --no-print-directory $(VENV)/colossalai || \
		echo "make test: ColossalAI can't be installed here, so its tests are skipped" >&2
	@$(BIN)/python -m pytest -m "not ci and not slow" $(IN_PROCESSES)

test-ci: install ## Run those that continuous integration runs beside them: further cases, and what takes long.
	@$(BIN)/python -m pytest -m "ci and not slow" $(IN_PROCESSES)

test-slow: install ## Run the sweeps that are too long for every change.
	@$(BIN)/python -m pytest -m slow

test-versions: install ## Run a part of the tests with each version of transformers and accelerate that is supported.
	@$(BIN)/python .ci/versions

gpu: install ## Run the checks that need a GPU, in about ten minutes on one; they write docs/gpu.md.
	@test "$(GPUS)" -gt 0 || { echo "make gpu: nvidia-smi finds no GPU" >&2; exit 1; }
	@mkdir -p docs/data/gpu
	@env -u DS_ACCELERATOR CUBOID_GPU_RECORD=docs/data/gpu/$$(date -u +%Y-%m-%d-%H%M).json $(BIN)/python -m pytest tests/gpu; \
	outcome=$$?; PYTHONPATH=tests $(BIN)/python -m gpu.page docs/data/gpu/*.json > docs/gpu.md; exit $$outcome

bench: install ## Measure everything that can run here, or CASE=…, with ARGS="…"; CASE=list says which, how long, with what needs.
	@$(BIN)/python benchmarks/run.py $(or $(CASE),all) $(ARGS)

docs: install ## Make the generated parts of docs/ again, and their pictures, or CASE=…; ARGS=--check writes nothing.
	@$(BIN)/python docs/generate.py $(CASE) $(ARGS)

# The site's packages have versions of their own, so they have an environment of their own.
$(VENV)/site/installed: configs/requirements-docs.txt | $(VENV)/installed
	@$(BIN)/python -m venv $(VENV)/site
	@$(VENV)/site/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

site: $(VENV)/site/installed ## Make the site, build/site/index.html, of docs/; a warning is an error.
	@$(VENV)/site/bin/python -m sphinx --quiet -W --keep-going docs build/site
	@echo "build/site/index.html"

lint: install ## Check style, types, names, and that imports only run down.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/python .ci/names

clean: ## Remove .venv and everything that is built; runs/ stays.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
