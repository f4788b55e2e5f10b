# From a fresh clone, with Python >= 3.10 and pip alone:
#
#   make demo     distil a teacher into a student on real text, on the GPU if there is one
#   make test     the quick tests: every test on a subset of its cases that covers every parameter
#                 value; in the emulator, the first tests of each file, on one case each; GPU tests
#                 run if there is a GPU. Six minutes on two cores the first time, installation and
#                 compilation of the kernels included; fewer later
#   make test-all all cases: the quick tests, then the remaining cases
#   make test TORCH='torch transformers'   include the tests of cukit.torch, skipped by default
#   make lint     ruff and strict mypy
#   make site     build the documentation into build/site; broken links and references are errors
#   make bench    time every kernel and its peers (needs a GPU)
#   make tables   generate the measured tables and figures from profiling/results/
#
# Everything is installed once, into .venv. `make demo ARGS="--help"` prints the demo's options.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
comma := ,
# One results file per kind of GPU; `make tables` publishes h200.json.
RESULTS ?= profiling/results/h200.json
# Additional packages for the tests of cukit.torch. Empty by default: on Linux the default build of
# torch installs 3 GB of CUDA libraries; PyTorch's CPU build is 200 MB.
TORCH ?=
# Test processes that share the GPU. Fewer processes need less GPU memory.
GPU_WORKERS ?= 4

# cuda12, cuda13 or empty, depending on this machine's driver; driver.py prints the reason.
GPU_EXTRA := $(shell $(PYTHON) -I cukit/core/driver.py 2>/dev/null)
DEMO_EXTRAS := [report$(addprefix $(comma),$(GPU_EXTRA))]
# The tests compile every kernel even without a GPU.
TEST_EXTRAS := [test,report,$(or $(GPU_EXTRA),compile)]

DEMO_STAMP := $(VENV)/.installed-demo$(addprefix -,$(GPU_EXTRA))
SITE_STAMP := $(VENV)/.installed-site
TEST_STAMP := $(VENV)/.installed-test$(addprefix -,$(GPU_EXTRA))$(if $(TORCH),-torch)

# Tests start several hundred Python programs. Without cached bytecode, each compiles all of cukit.
unexport PYTHONDONTWRITEBYTECODE

# Three runs: tests without the GPU, one process per core; GPU tests, in up to $(GPU_WORKERS)
# processes; tests that compare times on the GPU, in one process. $(1) selects cases by their marks.
# pytest exits with 5 if $(ARGS) selects no test.
define run_tests
	$(call pytest,-n auto,$(1) and not gpu)
	$(if $(GPU_EXTRA),$(call pytest,-n auto --maxprocesses $(GPU_WORKERS),$(1) and gpu and not timing))
	$(if $(GPU_EXTRA),$(call pytest,-n 0,$(1) and gpu and timing))
endef
pytest = $(BIN)/python -m pytest $(1) --dist worksteal -m "$(2)" $(ARGS) || [ $$? -eq 5 ]

.PHONY: demo test test-all lint site bench tables clean

demo: $(DEMO_STAMP)
	$(BIN)/cukit distill $(ARGS)

test: $(TEST_STAMP)
	$(call run_tests,not slow)

test-all: test
	$(call run_tests,slow)

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

site: $(SITE_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(DEMO_STAMP)
	$(BIN)/python -m profiling.run --out $(RESULTS) $(ARGS)

tables: $(DEMO_STAMP)
	$(BIN)/python -m profiling.tables
	$(BIN)/python -m profiling.proof_tables
	$(BIN)/python -m profiling.figures
	$(BIN)/python -m profiling.pool_tables
	$(BIN)/python -m profiling.pool_figures
	$(BIN)/python -m profiling.operator_figures

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(DEMO_STAMP): pyproject.toml | $(VENV)
	@$(PYTHON) -I cukit/core/driver.py >/dev/null
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.$(DEMO_EXTRAS)'
	@touch $@

$(SITE_STAMP): pyproject.toml | $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

$(TEST_STAMP): pyproject.toml | $(VENV)
	@$(PYTHON) -I cukit/core/driver.py >/dev/null
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.$(TEST_EXTRAS)' $(TORCH)
	@touch $@

$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "cukit needs Python 3.10 or newer; PYTHON=... chooses another")'
	$(PYTHON) -m venv $(VENV)
