# Everything a fresh checkout needs: Python 3.11+ and make. `make demo` and `make test` do all of the set-up.

PYTHON ?= python3
VENV := .venv
PEER_VENV := .venv-peer
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PEER_PIP := $(PEER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
TORCH := torch==2.13.0
PYTEST := $(BIN)/python -m pytest

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
define MAKE_VENV
@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
@$(PYTHON) -c "$(NEW_ENOUGH)" || { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), 3.11 or newer is needed; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1) || { rm -rf $(1); echo "error: $(PYTHON) cannot make virtual environments; install its venv package (python3-venv)" >&2; exit 1; }
endef

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-peers lint bench clean

help:
	@echo "make demo        install, make a small model family, merge it three ways, print a table"
	@echo "make test        install what tests need (torch and transformers too), run them"
	@echo "make test-peers  compare with mergekit, in an environment of its own"
	@echo "make lint        ruff and mypy"
	@echo "make bench       measure against the I/O floor, and against mergekit if test-peers installed it"
	@echo "make clean       remove environments, demo and caches"

# --- environments: one stamp for each thing that is installed, so that a second run installs nothing ---

$(VENV)/.made:
	$(call MAKE_VENV,$(VENV))
	@touch $@

$(VENV)/.package: $(VENV)/.made pyproject.toml
	@echo "installing mergepipe into $(VENV)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@echo "installing torch into $(VENV)"
	@$(PIP) $(TORCH)
	@touch $@

# torch first and by itself, so that no other package chooses another torch.
$(VENV)/.test: $(VENV)/.package $(VENV)/.torch
	@echo "installing what tests need into $(VENV)"
	@$(PIP) -e ".[test,torch]" $(TORCH)
	@touch $@

$(VENV)/.lint: $(VENV)/.package
	@echo "installing ruff and mypy into $(VENV)"
	@$(PIP) -e ".[test,lint]"
	@touch $@

$(PEER_VENV)/.peer: requirements/peer.txt
	$(call MAKE_VENV,$(PEER_VENV))
	@echo "installing mergekit into $(PEER_VENV)"
	@$(PEER_PIP) $(TORCH)
	@$(PEER_PIP) -r requirements/peer.txt
	@touch $@

# --- what to run ---

demo: $(VENV)/.package
	@$(BIN)/python examples/demo.py .demo

test: $(VENV)/.test
	$(PYTEST) -n 2 -m "not peer and not slow"

test-slow: $(VENV)/.test
	$(PYTEST) -n 2 -m slow

test-peers: $(VENV)/.test $(PEER_VENV)/.peer
	MERGEPIPE_REQUIRE_PEERS=1 $(PYTEST) -m peer tests/peer

lint: $(VENV)/.lint
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy src tests benchmarks examples

bench: $(VENV)/.package
	$(BIN)/python -m benchmarks.merge

clean:
	rm -rf $(VENV) $(PEER_VENV) .demo .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
