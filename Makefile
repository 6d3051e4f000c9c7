# `make help` lists the targets; CONTRIBUTING.md describes the code.
# Variables reach Python through the environment. No recipe names one, so no shell parses a user's
# value. A value on the command line is taken literally: $(shell ...) inside it is text.
override GIVEN := $(strip $(foreach v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(v)))),$(v))))
$(foreach v,$(GIVEN),$(eval override $(v) := $$(value $(v)))$(eval export $(v)))
# For tools/install/make_call.py and sft_play.config.targets, which refuse calls: names, no values
export override SFT_PLAY_VARIABLES := $(GIVEN)
export override SFT_PLAY_TARGETS := $(MAKECMDGOALS)
export override SFT_PLAY_MAKEFILE := $(MAKEFILE_LIST)

# PY=python3 uses your own environment and installs nothing.
PYTHON ?= python3
PY ?= .venv/bin/python
override PY := $(value PY)
export PYTHON PY

override SHELL := /bin/bash
override .SHELLFLAGS := -c
.DEFAULT_GOAL := help
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory
override ENV := $(if $(filter .venv/bin/python,$(PY)),.venv/.installed,.guard)
override SFT := "$$PY" -m sft_play
override NEWEST_PY := .venv-newest/bin/python
override PARALLEL_TESTS := "$$PY" -m pytest -n auto --maxprocesses 8 --dist worksteal
# Where the recipe itself does not start sft_play
override CHECK := $(if $(filter-out PY PYTHON,$(GIVEN)),$(SFT) check-variables,:)

help: .guard ## list the targets and variables
	@awk -F':.*## ' '/^## /{print "\n" substr($$0,4)} /^[a-z][a-z-]*:.*## /{printf "  %-22s %s\n",$$1,$$2}' Makefile
	@printf '\nVariables: CONFIG RUN NUM_GPUS DEEPSPEED_CONFIG TB_PORT DEVICE=cpu|cuda NNODES NODE_RANK\n'
	@printf 'MASTER_ADDR MASTER_PORT GPUS EXACT PROMPT RESUME ELASTIC, and every setting as SECTION_KEY:\n'
	@printf 'make train TRAIN_BATCH_SIZE=4 TUNING_LORA_R=32 (make config lists them).\n'

## Setup
install: $(ENV) ## make or mend .venv with the pinned packages; TORCH=cpu|cu126|cu130
	@$(CHECK)
install-unsloth: $(ENV) ## add the Unsloth backend to .venv, on a GPU host
	@$(CHECK)
	@"$$PY" -m tools.install add requirements-unsloth.txt
install-gguf: $(ENV) ## add llama.cpp to .venv for make export FORMAT=gguf; builds tens of minutes
	@$(CHECK)
	@"$$PY" -m tools.install add requirements-gguf.txt
	@"$$PY" -m tools.install.llama_cpp
setup-accelerate: $(ENV) ## write the accelerate file for this machine, without questions
	@$(SFT) setup-accelerate
gpu-info: $(ENV) ## list GPUs, their memory and links, and what this machine can run
	@$(SFT) gpu-info
memory-check: $(ENV) ## show the memory and load of each GPU, its processes, and running runs
	@$(SFT) memory-check
doctor: $(ENV) ## check versions, GPUs, NCCL, compilers and disk; print a command per fix
	@$(SFT) doctor

## Config and data
config: $(ENV) ## print every merged setting and where its value comes from
	@$(SFT) config
schema: $(ENV) ## print the JSON schema of a config file, for editors and programs
	@$(SFT) schema
plan: $(ENV) ## predict memory, speed and hours, here or on GPUS=2xH200; EXACT=1 traces
	@$(SFT) plan
data-check: $(ENV) ## read and render every row; count what is used and what is dropped
	@$(SFT) data-check
init: $(ENV) ## write OUT=config.yaml for MODEL_NAME and DATA_TRAIN_PATH, or from FROM
	@$(SFT) init
preview: $(ENV) ## print training samples by token, those with loss in color; write a page
	@$(SFT) preview

convert-notebook: $(ENV) ## convert an Unsloth notebook NB for several GPUs: OUT=x.ipynb or train.py
	@$(SFT) convert-notebook
check-notebook: $(ENV) ## score a notebook NB by the five points of one for several GPUs
	@$(SFT) check-notebook

## Train
train: $(ENV) ## fine-tune CONFIG, by default the included tiny model on the included rows
	@$(SFT) train
train-tb: $(ENV) ## the same with TensorBoard
	@$(SFT) train --tensorboard
train-bnb: $(ENV) ## train with PEFT and bitsandbytes (default CONFIG=configs/run_bnb.yaml)
	@$(SFT) train --backend bnb
train-bnb-tb: $(ENV) ## the same with TensorBoard
	@$(SFT) train --backend bnb --tensorboard
train-unsloth: $(ENV) ## train with Unsloth on a GPU (default CONFIG=configs/run_unsloth.yaml)
	@$(SFT) train --backend unsloth
train-unsloth-tb: $(ENV) ## the same with TensorBoard
	@$(SFT) train --backend unsloth --tensorboard
train-distributed: $(ENV) ## train on all GPUs or NUM_GPUS; TRAIN_STRATEGY=fsdp|ep|zero2|zero3
	@$(SFT) train --distributed
train-distributed-tb: $(ENV) ## the same with TensorBoard
	@$(SFT) train --distributed --tensorboard
train-deepspeed: $(ENV) ## train with ZeRO on all GPUs or NUM_GPUS, set up by DEEPSPEED_CONFIG
	@$(SFT) train --distributed --deepspeed
train-deepspeed-tb: $(ENV) ## the same with TensorBoard
	@$(SFT) train --distributed --deepspeed --tensorboard
slurm: $(ENV) ## write the batch script OUT=job.sh for NNODES machines of GPUS=8xH100
	@$(SFT) slurm

## Watch and use
tensorboard: $(ENV) ## start TensorBoard for all runs, on the loopback interface
	@$(SFT) tensorboard
tb-stop: $(ENV) ## stop the TensorBoard that was started here
	@$(SFT) tb-stop
runs: $(ENV) ## list the runs with status and scores
	@$(SFT) runs
watch: $(ENV) ## follow RUN, by default the latest, until it ends: loss, speed, GPUs
	@$(SFT) watch
compare: $(ENV) ## compare RUNS=a,b,... side by side: scores, settings, speed; a page in OUT
	@$(SFT) compare
report: $(ENV) ## write report.html of RUN again; every run writes its own when it ends
	@$(SFT) report
eval: $(ENV) ## score RUN (run, model folder, adapter) on DATA_TEST_PATH; COMPARE=1
	@$(SFT) eval
infer: $(ENV) ## answer PROMPT (IMAGE=x.png), standard input, or IN=x.jsonl OUT=y.jsonl
	@$(SFT) infer
chat: $(ENV) ## chat with RUN, and with its base if COMPARE=1; /help lists commands
	@$(SFT) chat
merge: $(ENV) ## merge RUN's adapter into its base, in MODEL_DTYPE; scored before
	@$(SFT) merge
export: $(ENV) ## write RUN for other programs: FORMAT=safetensors, gguf, fp8, int4, nvfp4
	@$(SFT) export
serve: $(ENV) ## serve RUN's export by vLLM or SFT-Play, on 127.0.0.1:8000 (BIND, PORT)
	@$(SFT) serve
check-server: $(ENV) ## compare the server at URL with RUN's export: prompt tokens, stops, answers
	@$(SFT) check-server
push: $(ENV) ## upload RUN's export to REPO=owner/name; private unless PUBLIC=1; SIGN=key
	@$(SFT) push

## Work on SFT-Play
embedded: $(ENV) ## rebuild the tiny model and its rows (10 minutes with a GPU, else a day)
	@$(CHECK)
	"$$PY" -m tools.embedded
bench: $(ENV) ## measure speed of ARMS on WORKS, on a GPU (first make install-unsloth)
	@$(CHECK)
	@"$$PY" -m benchmarks.machine
	@"$$PY" -m tools.install add requirements-bench.txt
	"$$PY" -m benchmarks.speed
bench-data: $(ENV) ## measure data preparation, compared with TRL's, which this installs
	@$(CHECK)
	@"$$PY" -m tools.install add requirements-bench.txt
	"$$PY" benchmarks/preparation.py
bench-scaling: $(ENV) ## measure WORKS on 1, 2, ... or GPUS="1 2" of this host, by STRATEGIES
	@$(CHECK)
	@"$$PY" -m benchmarks.machine
	@"$$PY" -m tools.install add requirements-bench.txt
	"$$PY" -m benchmarks.scaling --docs docs/evidence
bench-plan: $(ENV) ## compare plans with runs, WORKS or all, on a GPU; write their page
	@$(CHECK)
	"$$PY" -m benchmarks.planner --docs docs/evidence
test: $(ENV) ## run the tests that need no GPU, but for those of test-faults and test-long
	@$(CHECK)
	@$(PARALLEL_TESTS) -m "not gpu and not faults and not long and not architectures and not gguf"
test-fast: $(ENV) ## run the fast tests
	@$(CHECK)
	@$(PARALLEL_TESTS) -m "not gpu and not slow and not faults and not long and not architectures and not gguf"
test-faults: $(ENV) ## inject every fault, or ROWS=kill,flip COUNT=5; write the page of them
	@$(CHECK)
	@"$$PY" tests/run_faults.py
test-long: $(ENV) ## run the tests with long counts (minutes)
	@$(CHECK)
	@$(PARALLEL_TESTS) -m long
test-architectures: $(ENV) ## train every model type that was tried; write the page of them
	@$(CHECK)
	@$(PARALLEL_TESTS) -m architectures
test-newest: .guard ## test with TRANSFORMERS=newest or a version, in .venv-newest
	@"$$PYTHON" -m tools.install
	@$(NEWEST_PY) -m sft_play check-variables
	@$(NEWEST_PY) -m pytest -m "not gpu and not faults and not long and not architectures and not gguf" \
	  $$(cat tests/newest.txt)
	@$(NEWEST_PY) -m pytest -m architectures -k newer tests/test_architectures_table.py
test-gguf: $(ENV) ## run the tests that need llama.cpp; LLAMA_CPP, or make install-gguf first
	@$(CHECK)
	@"$$PY" -m pytest -m gguf
test-gpu: $(ENV) ## run the tests that need a GPU
	@$(CHECK)
	@"$$PY" -m pytest -m gpu
lint: $(ENV) ## check rules, format and plain English
	@$(CHECK)
	@"$$PY" -m ruff check . && "$$PY" -m ruff format --check .
	@"$$PY" -m tools.plain_english 'sft_play/*.py' 'sft_kernels/*.py' 'notebook_converter/*.py' \
	  ':(glob)docs/*.md' README.md CONTRIBUTING.md
docs: $(ENV) ## write the generated pages of docs/, and build the site in outputs/site
	@$(CHECK)
	@"$$PY" -m sft_play.config.reference && "$$PY" -m tools.docs
	@NO_MKDOCS_2_WARNING=1 "$$PY" -m mkdocs build --strict
# A target that does not exist. Without .venv nothing can name the nearest one, and none is made.
.DEFAULT:
	@command -v "$$PY" >/dev/null || { echo "no such target; make help lists them" >&2; exit 2; }
	@$(SFT) check-variables
clean: .guard ## remove caches; keep runs and .venv
	rm -rf .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# What this call says is checked before any recipe runs
.guard: FORCE
	@file="$${SFT_PLAY_MAKEFILE# }"; \
	"$$(command -v "$$PY" || echo "$$PYTHON")" -IS "$${file%Makefile}tools/install/make_call.py"
# tools/install makes and mends .venv. The check takes 30 ms; `make install` goes over everything.
install test-newest: export INSTALL_AGAIN := yes
test-newest: export INSTALL_INTO := .venv-newest
test-newest: export TRANSFORMERS ?= newest
.venv/.installed: .guard
	@.venv/bin/python -S -m tools.install --check 2>/dev/null || "$$PYTHON" -m tools.install
FORCE:

.PHONY: help install install-unsloth install-gguf setup-accelerate gpu-info \
  memory-check doctor config schema plan data-check init preview convert-notebook check-notebook \
  train train-tb train-bnb train-bnb-tb train-unsloth train-unsloth-tb \
  train-distributed train-distributed-tb train-deepspeed train-deepspeed-tb tensorboard \
  tb-stop slurm runs watch compare report eval infer chat merge export serve check-server \
  push embedded bench bench-data bench-plan bench-scaling test test-fast test-faults test-long \
  test-architectures test-newest test-gguf test-gpu lint docs clean
