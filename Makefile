PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Recreated when the dependencies change, so that a later `make` skips what is installed.
STAMP := $(VENV)/installed
# What tests outside the gate need on top: Ray Serve, KerasHub, and packages of Ray Data's sources.
MORE := $(VENV)/installed-more

.PHONY: train test test-fast test-all soak lint compat docs venv clean
.DELETE_ON_ERROR:

train: venv
	$(BIN)/python jobs/digits.py --num-workers 2

# Tests start many processes, which are not to each compile raytf again where the environment asks for that.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

# The gate: what `.ci/run` asks for. It tests outcomes alone, nothing is run again, and one heavy thing runs at a time.
test: test-fast
	$(PYTEST) -m gate tests/core -p no:rerunfailures

# Its first half, for the work in between: single parts, and two processes against one.
test-fast: venv
	$(PYTEST) -m gate tests/unit tests/processes/test_parity.py -p no:rerunfailures \
		--numprocesses 2 --dist loadfile --no-loadscope-reorder

# All that is not in the gate, each part to its end. What fails is run once more, and shown and named (RERUN).
test-all: $(MORE)
	@failed=; for part in tests/unit tests/processes "tests/cluster tests/jobs"; do \
	  $(PYTEST) -m "not gate" --reruns 1 --rerun-show-tracebacks $$part || failed="$$failed $$part"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# Figures of hours: plans of random faults, hangs that are to be named, memory of processes that live long, how processes
# end, and what the doctor reports of hosts that are broken one by one.
soak: venv
	$(BIN)/python jobs/benchmarks/fault_plans.py
	$(BIN)/python jobs/benchmarks/hangs.py
	$(BIN)/python jobs/benchmarks/memory.py
	$(BIN)/python jobs/benchmarks/ends.py
	$(PYTEST) tests/processes/test_doctor_hosts.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(PYTEST) --quiet tests/lint -p no:rerunfailures --numprocesses 2

compat: venv
	$(BIN)/python -m tests.compat.matrix

# The site, in build/site. A dead link fails it, as mkdocs is strict; a name of the API without a docstring fails
# docs/api.py. The packages are an extra, as nothing else needs them.
DOCS := $(VENV)/installed-docs
docs: $(DOCS)
	$(BIN)/python docs/api.py
	$(BIN)/python docs/commands.py
	$(BIN)/python docs/refusals.py
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

$(MORE): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[serve,sources,kerashub]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
