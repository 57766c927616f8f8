# Each target sets up what it needs: a virtual environment in .venv, torch first, then this package by its constraints.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some machines have it set. Every process of an engine would then compile all that it imports, each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test tests test-all clients lint clean

demo: $(VENV)/.run
	$(BIN)/engine batch -i examples/prompts.jsonl -o - --progress line | tee demo.jsonl
	@$(BIN)/python examples/show.py demo.jsonl

# Tests of processes mostly wait for them, so there is one worker more than cores (nproc believes OMP_NUM_THREADS). Files are
# begun as `tests/order.py` says.
WORKERS := $(shell echo $$(($$(env -u OMP_NUM_THREADS nproc) + 1)))

test: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j2 lint tests

tests: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not clients"

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
define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) "torch==$(shell sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@
endef

$(VENV)/.run: EXTRAS := nixl
$(VENV)/.run: pyproject.toml constraints.txt
	$(install)

# What tests import is compiled then. To compile the rest of torch as well would take pip as long as all else here.
$(VENV)/.dev: EXTRAS := nixl,dev
$(VENV)/.dev: PIP_FLAGS := --no-compile
$(VENV)/.dev: pyproject.toml constraints.txt
	$(install)
	touch $(VENV)/.run

clean:
	rm -rf $(VENV) .clients demo.jsonl build *.egg-info
