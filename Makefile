# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A spinning OpenMP runtime starves its neighbours when cores are few.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-slow test-instruction-sets lint bench locked lock clean

demo: $(VENV)/.serve
	$(BIN)/hybridserve serve demo --host 127.0.0.1 --port 8000

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

# The same tests where sums run in another order: torch without vectors and native kernels in the order of AVX-512, both for AVX2 only.
test-instruction-sets: $(VENV)/.dev
	ATEN_CPU_CAPABILITY=default PATH="$(CURDIR)/tests/compilers/sixteen-lanes:$$PATH" $(BIN)/python -m pytest -n auto --dist worksteal
	ATEN_CPU_CAPABILITY=avx2 PATH="$(CURDIR)/tests/compilers/x86-64-v3:$$PATH" $(BIN)/python -m pytest -n auto --dist worksteal

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

# Every package of requirements.lock, its hash checked. pip resolves nothing here, so nothing else can come along.
locked:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --require-hashes --no-deps -r requirements.lock
	$(BIN)/pip install -q --no-build-isolation --no-deps -e .
	touch $(VENV)/.serve $(VENV)/.dev

# torch's line is of its CPU build for Linux; for another build, install torch first and leave that line out.
lock:
	test -x $(VENV)-lock/bin/python || $(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install -q pip-tools
	$(VENV)-lock/bin/pip-compile -q --generate-hashes --allow-unsafe --extra dev --strip-extras --no-emit-index-url --no-emit-find-links \
		--no-emit-trusted-host --no-header --no-annotate -c constraints.txt --output-file requirements.lock pyproject.toml
	sed -i 's/^torch==\([0-9.]*\)+cpu /torch==\1 /' requirements.lock
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
