# nanolm: `make` lists the recipes. Only Python 3.11 or newer and make need to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NANOLM := $(BIN)/nanolm
READY := $(VENV)/ready

FILE ?=
DATA ?=
WHAT ?=
PROMPT ?=
RUN ?=
ARGS ?=
export FILE DATA WHAT PROMPT RUN SMALL LARGE SST SST_TEST GPT2 MINUTES COURSE

.DEFAULT_GOAL := help
.PHONY: help setup demo course train sample finetune-sentiment serve resume test test-slow bench lint data wheel clean

help: ## list the recipes
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-34s %s\n", $$1 hint[$$1], $$2} \
	  /^# hint / {split($$0, part, / hint |: /); hint[part[2]] = " " part[3]}' Makefile

setup: $(READY) ## make .venv and install nanolm with its test tools into it

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("nanolm needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@echo "installing into $(VENV) (torch is large: a minute or more)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: setup ## train on the embedded stories (2 minutes), then write three new ones
	@$(NANOLM) train embedded:stories --minutes 2
	@echo
	@$(NANOLM) sample -n 3 --tokens 250 --temperature 0.7 </dev/null
	@echo
	@echo 'Now try:'
	@echo '  $(NANOLM) sample --prompt "Once upon a time"     write on from your own words'
	@echo '  $(NANOLM) train your-text.txt                    three minutes on your own text'
	@echo '  $(NANOLM) train embedded:tiny --preset nano      the smallest model of all'
	@echo '  $(NANOLM) --help'

# hint course: SST=sst2.tsv
course: setup ## the course's assignment, step by step; also SMALL=, LARGE=, SST_TEST=, GPT2= (docs/course.md)
	@NANOLM='$(NANOLM)' sh data/course.sh

# hint train: FILE=text.txt
train: setup ## train on your text (more options: ARGS="--minutes 10")
	@test -n "$$FILE" || { echo 'say which text: make train FILE=your-text.txt'; exit 2; }
	@$(NANOLM) train "$$FILE" $(ARGS)

# hint sample: PROMPT="Once upon"
sample: setup ## write with the newest run (or RUN=runs/x)
	@$(NANOLM) sample $${RUN:+"$$RUN"} --prompt "$$PROMPT" $(ARGS)

# hint finetune-sentiment: DATA=x.tsv
finetune-sentiment: setup ## teach the newest run (or RUN=runs/x, RUN=none) to tell good from bad
	@$(NANOLM) finetune-sentiment $${DATA:+"$$DATA"} $${RUN:+--from "$$RUN"} $(ARGS)

# hint serve: RUN=runs/x
serve: setup ## a playground in the browser, and an API, for a model
	@test -n "$$RUN" || { echo 'say which model: make serve RUN=runs/x'; exit 2; }
	@$(NANOLM) serve "$$RUN" $(ARGS)

# hint resume: RUN=runs/x
resume: setup ## go on with an unfinished run
	@test -n "$$RUN" || { echo 'say which run: make resume RUN=runs/x'; exit 2; }
	@$(NANOLM) train --config "$$RUN/config.toml" --out "$$RUN" --resume $(ARGS)

test: setup ## run the tests
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-slow: setup ## run the longer trials too
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --hypothesis-profile default $(ARGS)

# hint bench: WHAT=training
bench: setup ## measure against others: training, sampling, serving, feeding, starting, saving; text and learning FILE=, classifying DATA=
	@what=$${WHAT:-$${FILE:+text}}; what=$${what:-$${DATA:+classifying}}; \
	  OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/$${what:-training}.py $${FILE:+"$$FILE"} $${DATA:+"$$DATA"} $(ARGS)

lint: setup ## check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

data: setup ## write the embedded corpora anew, byte for byte the same
	@$(BIN)/python data/generate.py

wheel: setup ## build a wheel into dist/
	@$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## remove .venv, dist and caches; runs/ stays
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
