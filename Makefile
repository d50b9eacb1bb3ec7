# Everything runs in $(VENV), made on demand. `make` alone lists the targets.
#   PYTHON   the interpreter that the environment is made from (3.11 or newer)
#   WORKERS  processes that `make test` runs side by side
#   MINUTES  budget of `make demo`: prompts and answers, training and both measurements together

PYTHON ?= python3
VENV ?= .venv
MINUTES ?= 20
WORKERS ?= 2
DEMO ?= runs/demo-$(MINUTES)min

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TARGET := smollm2-135m-instruct
# The environment of what draftsmith's distillation is compared with; `bench` compares where it exists.
TRL ?= .venv-trl
BENCHES := $(filter-out bench/results.py bench/heads.py bench/online.py bench/gpu_check.py bench/trl_gkd.py bench/_%,$(wildcard bench/*.py))
# The evaluation keeps to its share of the budget by its number of prompts; the file's order is balanced over categories.
LIMIT ?= $(shell awk 'BEGIN { n = int(3 * $(MINUTES)); print (n < 12 ? 12 : n) }')

# What the demo's drafter drafts: the tree that this machine's measured costs favour, or one given as widths or paths.
TREE ?= auto

.DEFAULT_GOAL := help
.PHONY: help install demo test lint check bench bench-trl results results-heads results-online gpu-check clean
.DELETE_ON_ERROR:

help:
	@echo 'make install              the environment in $(VENV)'
	@echo 'make demo [MINUTES=20]    train a drafter for a real chat model and measure it; an interrupted run goes on'
	@echo 'make test                 the test suite'
	@echo 'make check                test, ruff, pyright'
	@echo 'make bench                decoding, losses and data generation against their marks'
	@echo 'make bench-trl            distillation side by side with trl (installed into $(TRL))'
	@echo 'make results              the tables of docs/results.md'
	@echo 'make results-heads        its table of all kinds of drafters at an equal training budget'
	@echo 'make results-online       its comparison of a stream that a drafter learns from while it serves it'
	@echo 'make gpu-check            training, resuming and decoding in bf16 on CUDA'
	@echo 'make clean                remove the environment and build products; runs/ and downloads stay'

install: $(STAMP)

# torch comes first and alone: whichever build pip is set up to find (CPU or CUDA) then satisfies the rest.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "draftsmith needs Python 3.11 or newer: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,bench]'
	@touch $@

demo: install
	$(BIN)/draftsmith train distill_smollm2 engine.minutes=$(MINUTES) evaluate.limit=$(LIMIT) output=$(DEMO) --resume
	$(BIN)/draftsmith eval $(TARGET) $(DEMO)/final --untrained $(DEMO)/start --prompts shipped --limit $(LIMIT) \
		--tree '$(TREE)' --drafter-dtype auto --max-new-tokens 40 --out $(DEMO)/report
	@echo
	@echo 'The report: $(DEMO)/report/report.html (the numbers: $(DEMO)/report/report.json)'

# One thread a worker: the models are tiny, and two threads on a busy machine are slower than one.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

check: test lint

bench: install
	@set -e; for script in $(BENCHES); do echo "== $$script"; $(BIN)/python $$script; done
	@if test -x $(TRL)/bin/python; then $(BIN)/python bench/trl_gkd.py --environment $(TRL); \
		else echo "bench/trl_gkd.py: left out, make bench-trl installs what it compares with"; fi

bench-trl: install
	$(BIN)/python bench/trl_gkd.py --environment $(TRL) --install

results: install
	$(BIN)/python bench/results.py

results-heads: install
	$(BIN)/python bench/heads.py

results-online: install
	$(BIN)/python bench/online.py

gpu-check: install
	$(BIN)/python bench/gpu_check.py

clean:
	rm -rf $(VENV) build draftsmith.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
