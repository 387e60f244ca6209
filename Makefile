# The README's two commands are `make demo` and `make test`; each is complete on a fresh machine.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
# A CPU build of torch comes without triton; a CUDA build brings and pins its own.
TRITON_FOR_CPU := triton==3.6.0
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# pip's last line, in place, where there is a terminal to show it on; its errors always
LAST_LINE := awk -v tty=$$([ -t 2 ] && echo 1 || echo 0) \
	'tty && /^(Collecting|Downloading|Installing)/ { printf "\r\033[K  %s", substr($$0, 1, 70); fflush() } \
	END { if (tty) printf "\r\033[K" }'
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest

.PHONY: coverage-report demo test test-slow prove-ep lint format serve setup clean

demo: .venv/.ready
	@$(BIN)/onboard demo

serve: .venv/.ready
	@$(BIN)/onboard serve

test: lint
	$(PYTEST) -n 2 --dist loadfile -m "not slow and not gpu"

test-slow: .venv/.ready-dev
	$(PYTEST) -n 2 --dist loadfile -m "slow and not gpu"

# trains small models over four processes and in one, and compares losses, norms, gradients and weights
prove-ep: .venv/.ready
	@OMP_NUM_THREADS=1 $(BIN)/python -m runtime.prove $(PROVE)

coverage-report: .venv/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.coverage --jobs 2 --report docs/coverage.md

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
	@start=$$(date +%s); $(PIP) -e . | $(LAST_LINE) && \
		{ $(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(TRITON_FOR_CPU) | $(LAST_LINE); } && \
		echo "setting up .venv ... done ($$(( $$(date +%s) - start )) s)"
	@touch $@

.venv/.ready-dev: .venv/.ready
	@$(PIP) -e '.[dev]' | $(LAST_LINE)
	@touch $@

clean:
	rm -rf .venv .onboard bundles .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
