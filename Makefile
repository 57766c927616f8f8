# Each target sets up what it needs: a virtual environment in .venv, torch first, then this package by its constraints.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-all clients lint clean

demo: $(VENV)/.run
	$(BIN)/engine batch -i examples/prompts.jsonl -o - --progress line | tee demo.jsonl
	@$(BIN)/python examples/show.py demo.jsonl

# A process for each core; what kills, stops and times whole clusters runs alone after it.
# The longest first, so that none of them is left to the end.
BESIDE := sim model actors kernels front batch bench cli nano console transport core faces style
BESIDE := $(BESIDE:%=tests/%)

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -q -n auto --dist loadfile -m "not slow and not gpu" $(BESIDE)
	$(BIN)/python -m pytest -q -m "not slow and not gpu and not clients" $(BESIDE:%=--ignore=%)

test-all: $(VENV)/.dev lint
	$(BIN)/python -m pytest -q -m "not clients"

# Other people's clients, each in an environment of its own (docs/clients.md). The first time some 250 MB are downloaded,
# into 2.2 GB on disk, in some four minutes. The tests take two minutes; they have ten and are ended then.
CLIENTS := vllm-htop lm-eval aiperf

clients: $(VENV)/.dev $(CLIENTS:%=.clients/%/.done)
	timeout --signal=INT 600 $(BIN)/python -m pytest -q -m clients --durations=0 tests/clients

.clients/%/.done: tests/clients/requirements-%.txt
	rm -rf .clients/$*
	$(PYTHON) -m venv .clients/$*
	.clients/$*/bin/python -m pip install -q --no-deps -r $<
	touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# torch goes first and by its exact version, so that no later requirement can pick another build of it.
$(VENV)/.run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "torch==$(shell sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[nixl]"
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[nixl,dev]"
	touch $@

clean:
	rm -rf $(VENV) .clients demo.jsonl build *.egg-info
