# `make test` is all that a fresh machine needs: it makes .venv, installs the servers, runs all tests.
# Another interpreter: make PYTHON=python3.12 test. Options of pytest: make test ARGS="-k redis -x".

BIN := .venv/bin
METADATA := setup.cfg pyproject.toml celery_anarchon/_version.py tools/venv.sh

.PHONY: help test unit lint format types docs bench demo servers clean

help:
	@echo "make test     all tests, on real servers (installs what is missing)"
	@echo "make unit     the tests that need no server"
	@echo "make demo     three replicas on this machine, and one of them dies"
	@echo "make lint     style and the walls between modules"
	@echo "make format   put the style right"
	@echo "make types    mypy, strict"
	@echo "make docs     the examples in the documentation"
	@echo "make bench    benchmarks"
	@echo "make clean    remove what make has made, the fetched servers too"

test: .venv/.installed servers
	$(BIN)/python -m pytest -n 4 --dist worksteal $(ARGS)

unit: .venv/.installed
	env -u CI ANARCHON_TEST_SERVERS= $(BIN)/python -m pytest $(ARGS)

demo: .venv-demo/.installed
	.venv-demo/bin/python -m celery_anarchon.demo $(ARGS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/.installed
	$(BIN)/mypy

docs: .venv/.installed servers
	$(BIN)/python -m pytest docs $(ARGS)

bench: .venv/.installed servers
	$(BIN)/python -m benchmarks $(ARGS)

servers:
	@tests/servers/install.sh

clean:
	rm -rf .venv .venv-demo .servers .tox build dist .pytest_cache .mypy_cache .ruff_cache

.venv/.installed: $(METADATA)
	@tools/venv.sh .venv '.[dev]'

# The demo shows what a user gets: the package and its dependencies, no tools.
.venv-demo/.installed: $(METADATA)
	@tools/venv.sh .venv-demo .
