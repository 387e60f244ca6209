# The README's two commands are `make demo` and `make test`; each is complete on a fresh machine.

PYTHON ?= python3
BIN := .venv/bin
# A CPU build of torch comes without triton; a CUDA build brings and pins its own.
TRITON_FOR_CPU := triton==3.6.0
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest

.PHONY: demo test test-slow lint format serve setup clean

demo: .venv/.ready
	@$(BIN)/onboard demo

serve: .venv/.ready
	@$(BIN)/onboard serve

test: lint
	$(PYTEST) -n 2 --dist loadfile -m "not slow and not gpu"

test-slow: .venv/.ready-dev
	$(PYTEST) -n 2 --dist loadfile -m "slow and not gpu"

lint: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; set PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
		{ echo "python3 -m venv failed; on Debian: apt install python3-venv"; exit 1; }
	@echo "setting up .venv (torch and the rest, a few minutes the first time)"
	@start=$$(date +%s); $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . && \
		{ $(BIN)/python -c 'import triton' 2>/dev/null || \
		  $(BIN)/python -m pip install --quiet --disable-pip-version-check $(TRITON_FOR_CPU); } && \
		echo "setting up .venv ... done ($$(( $$(date +%s) - start )) s)"
	@touch $@

.venv/.ready-dev: .venv/.ready
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .onboard bundles .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
