# The verbs of this project. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest

.PHONY: help demo test test-slow test-thorough test-nccl coverage check bench docs examples dist format clean

help:  ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cli,dev,bench,docs,integrations]'
	touch $@

demo: $(READY)  ## train a small GPT with DDP, sharded under DDP and sharded without it, and compare
	$(BIN)/shardstep demo

# Three workers for two cores, since a test mostly waits for its ranks; none is left with a long rest.
test: $(READY)  ## run the fast tests
	$(PYTEST) -n 3 --dist worksteal -m "not slow and not thorough" tests

test-slow: $(READY)  ## run the slow tests: more ranks, faults, frameworks (make examples runs the examples)
	$(PYTEST) -n 2 -m slow --ignore tests/test_examples.py tests

test-thorough: $(READY)  ## run every scenario with all options, one and three ranks, late messages
	$(BIN)/python -m pytest -n 2 -m thorough tests

test-nccl: $(READY)  ## run every scenario over NCCL with several ranks on one GPU, and record the result
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
		then NCCL_RESULTS=benchmarks/results/nccl-tests.json $(PYTEST) -n 6 --dist worksteal tests/nccl tests/gpu; \
		else echo "test-nccl: there is no GPU here, so nothing was run"; fi

coverage: MEASURED := $(BIN)/python -m coverage run -m pytest
coverage: $(READY)  ## make test and make test-slow with coverage of every rank
	$(BIN)/python -m coverage erase
	$(MAKE) test PYTEST="$(MEASURED)"
	$(MAKE) test-slow PYTEST="$(MEASURED)"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --fail-under=95

check: $(READY)  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## rewrite the files in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure against DDP, torch's ZeroRedundancyOptimizer and FSDP2
	$(BIN)/python benchmarks/hosts.py

examples: $(READY)  ## run every example, and every command that the documentation shows
	$(BIN)/python -m pytest tests/test_examples.py

docs: $(READY)  ## check the documentation's links and code blocks, and build its site in site/
	$(BIN)/python -m pytest tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(READY)  ## build the sdist and the wheel in dist/, and train with the wheel in a bare environment
	rm -rf dist
	$(BIN)/python -m hatchling build
	set -e; folder=$$(mktemp -d); trap "rm -rf $$folder" EXIT; cp examples/train.py $$folder; \
	$(BIN)/python tests/support/pages.py README.md $$folder; \
	$(PYTHON) -m venv $$folder/venv; \
	$$folder/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"$$(ls $(CURDIR)/dist/*.whl)[cli]"; \
	cd $$folder; export PATH=$$folder/venv/bin:$$PATH; unset PYTHONPATH; \
	torchrun --standalone --nproc-per-node=2 train.py; \
	torchrun --standalone --nproc-per-node=2 quickstart.py; \
	shardstep --version; shardstep plan --model gpt2-124m --ranks 2; shardstep demo --help > demo.txt

clean:  ## remove what the other verbs made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov site dist
