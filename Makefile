PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Made anew when the dependencies change, so that a later `make` skips what is installed.
STAMP := $(VENV)/installed

.PHONY: train test test-fast lint compat docs venv clean
.DELETE_ON_ERROR:

train: venv
	$(BIN)/python jobs/digits.py --num-workers 2

# Tests wait a good part of their time: two processes of pytest, each with a Ray of its own, take a file at a time.
# They start many others, which are not to compile raytf each anew where the environment asks for that.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Real clusters on machines that others use, too: what fails is run once more, and shown and named (RERUN) all the same.
test: venv
	$(PYTEST) --reruns 1 --rerun-show-tracebacks

# For the work in between: single parts, and two processes against one; without what takes seconds (`slow`).
test-fast: venv
	$(PYTEST) -m "not slow" tests/unit tests/processes/test_parity.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

compat: venv
	$(BIN)/python -m tests.compat.matrix

# The site, in build/site; a dead link, or a name of the API without a docstring, fails it. The packages are an extra,
# as nothing else needs them.
DOCS := $(VENV)/installed-docs
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--editable '.[jobs,examples,optuna,benchmarks,test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
