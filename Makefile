# nanolm: `make` lists the targets. They need only make and Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NANOLM := $(BIN)/nanolm
READY := $(VENV)/ready
DOCS_READY := $(VENV)/docs-ready

FILE ?=
DATA ?=
WHAT ?=
PROMPT ?=
RUN ?=
ARGS ?=
export FILE DATA WHAT PROMPT RUN SMALL LARGE SST SST_TEST GPT2 MINUTES COURSE PAIR_MINUTES

.DEFAULT_GOAL := help
.PHONY: help setup demo course course-pairs train sample finetune-sentiment translate serve resume test test-slow bench lint docs data wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-34s %s\n", $$1 hint[$$1], $$2} \
	  /^# hint / {split($$0, part, / hint |: /); hint[part[2]] = " " part[3]}' Makefile

setup: $(READY) ## create .venv and install nanolm with its development tools

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("nanolm needs Python 3.11 or newer; try make PYTHON=python3.12 ...")'
	@echo "installing into $(VENV); torch is large, so this takes a minute or more"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: setup ## train on the embedded stories for 2 minutes, then generate three new ones
	@$(NANOLM) train embedded:stories --minutes 2
	@echo
	@$(NANOLM) sample -n 3 --tokens 250 --temperature 0.7 </dev/null
	@echo
	@echo 'Now try:'
	@echo '  $(NANOLM) sample --prompt "Once upon a time"     continue your own prompt'
	@echo '  $(NANOLM) train your-text.txt                    train on your own text for three minutes'
	@echo '  $(NANOLM) train embedded:tiny --preset nano      train the smallest model'
	@echo '  $(NANOLM) --help                                 list all commands'

# hint course: SST=sst2.tsv
course: setup ## run the course assignment step by step; also SMALL=, LARGE=, SST_TEST=, GPT2= (docs/course.md)
	@NANOLM='$(NANOLM)' sh data/course.sh

course-pairs: setup ## train four sequence-to-sequence models, from the bottleneck to attention (docs/course.md)
	@NANOLM='$(NANOLM)' sh data/course.sh pairs

# hint train: FILE=text.txt
train: setup ## train on your text (add options with ARGS="--minutes 10")
	@test -n "$$FILE" || { echo 'no text given; try make train FILE=your-text.txt'; exit 2; }
	@$(NANOLM) train "$$FILE" $(ARGS)

# hint sample: PROMPT="Once upon"
sample: setup ## generate text with the newest run (or RUN=runs/x)
	@$(NANOLM) sample $${RUN:+"$$RUN"} --prompt "$$PROMPT" $(ARGS)

# hint finetune-sentiment: DATA=x.tsv
finetune-sentiment: setup ## fine-tune the newest run (or RUN=runs/x, RUN=none) as a sentiment classifier
	@$(NANOLM) finetune-sentiment $${DATA:+"$$DATA"} $${RUN:+--from "$$RUN"} $(ARGS)

# hint translate: RUN=runs/x FILE=lines.txt
translate: setup ## translate the lines of a file with a model that was trained on pairs
	@test -n "$$RUN" || { echo 'no model given; try make translate RUN=runs/x FILE=lines.txt'; exit 2; }
	@$(NANOLM) translate "$$RUN" $${FILE:+--file "$$FILE"} $(ARGS)

# hint serve: RUN=runs/x
serve: setup ## serve a model, with a playground in the browser and an API
	@test -n "$$RUN" || { echo 'no model given; try make serve RUN=runs/x'; exit 2; }
	@$(NANOLM) serve "$$RUN" $(ARGS)

# hint resume: RUN=runs/x
resume: setup ## resume an unfinished run
	@test -n "$$RUN" || { echo 'no run given; try make resume RUN=runs/x'; exit 2; }
	@$(NANOLM) train --config "$$RUN/config.toml" --out "$$RUN" $(ARGS)

test: setup ## run the tests
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-slow: setup ## run all tests, including the slow ones
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --hypothesis-profile default $(ARGS)

# hint bench: WHAT=training
bench: setup ## run a benchmark: training, sampling, serving, feeding, starting, saving, pairs; text and learning need FILE=, classifying needs DATA=
	@what=$${WHAT:-$${FILE:+text}}; what=$${what:-$${DATA:+classifying}}; \
	  OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/$${what:-training}.py $${FILE:+"$$FILE"} $${DATA:+"$$DATA"} $(ARGS)

lint: setup ## check style and types with ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(DOCS_READY) ## build the documentation site in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo 'open site/index.html in a browser'

$(DOCS_READY): $(READY)
	@$(BIN)/pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $(DOCS_READY)

data: setup ## regenerate the embedded corpora (byte-identical)
	@$(BIN)/python data/generate.py

wheel: setup ## build a wheel into dist/
	@$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## remove .venv, dist, site and caches; keep runs/
	rm -rf $(VENV) dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
