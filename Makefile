# `make search`, `make test` and `make check` set up what they need: nothing is prepared beforehand.
PYTHON ?= python3
BIN := .venv/bin
# A cap that binds: about half of what the baseline needs on this device.
MAX_MEM ?= $(shell if nvidia-smi -L >/dev/null 2>&1; then echo 4GiB; else echo 48MiB; fi)
SEARCH ?= --space quick --max-mem $(MAX_MEM) --trials 16 --time-budget 3m30s

.PHONY: search test check setup

search: setup
	$(BIN)/autotune search $(SEARCH)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(TESTS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group dev -e .
	touch $@
