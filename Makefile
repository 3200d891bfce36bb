# `make search`, `make test`, `make check` and `make wheel` set up what they need: nothing is prepared beforehand.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# A cap that binds: about half of what the baseline needs on this device.
MAX_MEM ?= $(shell if nvidia-smi -L >/dev/null 2>&1; then echo 4GiB; else echo 48MiB; fi)
SEARCH ?= --space quick --max-mem $(MAX_MEM) --trials 16 --time-budget 3m30s


# `make test-cuda` runs the CUDA code on a stand-in GPU (tests/stand_in_gpu), in an environment with torch's CUDA build.
CUDA_ENV ?= .venv-cuda
CUDA_TESTS ?= tests
STAND_IN := $(CUDA_ENV)/stand_in_gpu
LOWEST_TORCH := $(shell sed -n 's/^ *"torch>=\([0-9.]*\).*/\1/p' pyproject.toml).0

.PHONY: search test test-cuda check wheel setup

search: .venv/search
	$(BIN)/autotune search $(SEARCH)

# More processes than cores: the tests wait for servers and for limits of time.
TEST_PROCESSES ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() * 3 // 2)")

# Compiled once, for the hundreds of processes that the tests start: also where Python is told to write no bytecode.
test: setup
	$(BIN)/python -m compileall -q autotune
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(TESTS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	! test -x $(BIN)/hadolint || $(BIN)/hadolint docs/deploy/Dockerfile

# The built wheel on every Python of this machine that it is for.
wheel: setup
	$(BIN)/python .ci/try_wheel.py

setup: .venv/installed

# What a search needs: torch and the package.
.venv/search: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) "pip>=25.1"
	$(INSTALL) -e .
	touch $@

# What the tests and the checks need besides: trainers, a browser's driver, servers.
.venv/installed: .venv/search
	$(INSTALL) --group dev
	touch $@

# Every test that a GPU would run, then those that only a stand-in can. An environment of your own is used as it is.
test-cuda: $(filter .venv-cuda,$(CUDA_ENV))
	$(CUDA_ENV)/bin/python tests/stand_in_gpu/build.py $(STAND_IN)
	export OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)" STAND_IN_BUILD="$(abspath $(STAND_IN))"; \
	tests/stand_in_gpu/test $(CUDA_ENV)/bin/python $(CUDA_TESTS)

.PHONY: .venv-cuda
.venv-cuda: .venv-cuda/installed

# torchao, and what torch brings itself, come in the versions that go with the lowest torch, not with the pinned one.
.venv-cuda/installed: pyproject.toml constraints.txt
	test -x .venv-cuda/bin/python || $(PYTHON) -m venv .venv-cuda
	grep -viE '^(torch|torchao|deepspeed|networkx|sympy)==' constraints.txt >.venv-cuda/constraints.txt
	.venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-cuda/constraints.txt \
		torch==$(LOWEST_TORCH) transformers torchao trl bitsandbytes pytest pytest-timeout hypothesis -e ".[service]"
	touch $@
