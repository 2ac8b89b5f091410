# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A spinning OpenMP runtime starves its neighbours when cores are few.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-slow lint bench clean

demo: $(VENV)/.serve
	$(BIN)/hybridserve serve demo --host 127.0.0.1 --port 8000

test: $(VENV)/.dev
	$(BIN)/python -m pytest

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check hybridserve tests benchmarks docs
	$(BIN)/ruff format --check hybridserve tests benchmarks docs
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/python -m benchmarks.demo_recall
	$(BIN)/python -m benchmarks.startup

$(VENV)/.serve: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
