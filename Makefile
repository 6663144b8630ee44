# `make` lists the targets. CI runs the same ones.

PYTHON ?= python3.11
ARGS ?=
BENCH_ARGS ?=
BASE ?= HEAD
TRIALS ?= 20
PART ?=
BIN := .venv/bin
READY := .venv/.stamp
PEERS := .venv/peers
CUDA := .venv/cuda
STUBS := .venv/stubs

# Two torch threads per process under contention are many times slower than one.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE
# Some containers set it: every process would then compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: docs help setup interpreter bubblewrap run test test-all nightly unit core golden history tools structure slurm prometheus campaign peers te-stub cuda-stub container fresh check bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: interpreter $(READY)  ## the environment in .venv, from the locks (PYTHON=python3.11, or python3.12, python3.13)

interpreter: # a .venv that is there keeps its Python: naming another does not pass silently
	@test "$(origin PYTHON)" = file -o ! -x $(BIN)/python || test "$$($(BIN)/python -V)" = "$$($(PYTHON) -V 2>&1)" || \
	{ echo ".venv has $$($(BIN)/python -V), and PYTHON=$(PYTHON) is $$($(PYTHON) -V 2>&1): unset PYTHON, or rename .venv" >&2; false; }

$(READY): requirements/cpu.txt requirements/dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m asyncrl.extensions.install --cpu --quiet
	$(BIN)/pip install --quiet --no-deps -r requirements/dev.txt && $(BIN)/pip install --quiet --no-deps --no-build-isolation -e . && touch $@

bubblewrap: setup  ## bubblewrap for sandboxes, unpacked into .venv, where it is not installed
	$(BIN)/python scripts/debian_tools.py bubblewrap .venv/bubblewrap

run: setup bubblewrap  ## asyncrl-train ARGS="..."; without ARGS the embedded default
	$(BIN)/asyncrl-train $(ARGS)

FREE := not campaign and not gpu and not multi_gpu and not structure
PYTEST := $(BIN)/pytest -q --durations=10
# By file, since the tests of a file share what they start; unit tests fill the waits of runs.
SESSION := $(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder tests

test: tools  ## what a newcomer and CI run: the claims of the core once, all unit tests
	$(SESSION) -m "$(FREE) and not nightly"

test-all: tools te-stub peers history  ## everything that is deterministic (AGENTS.md)
	$(SESSION) -m "$(FREE)"

nightly: tools  ## the tests of test-all that test does not have; PART=2/6 is one part of them
	$(SESSION) --part=$(PART) -m "$(FREE) and nightly"

core: setup bubblewrap  ## what is left where extensions are deleted (ARGS="NAME ..." for some)
	$(BIN)/python scripts/core.py $(ARGS)

unit: setup  ## the tests that start nothing
	$(PYTEST) -n 3 tests --ignore=tests/integration -m "$(FREE) and not nightly and not integration"

history: setup bubblewrap  ## the curves of the tiny and the default run against results/history.json: 8 minutes
	$(BIN)/python scripts/history.py $(ARGS)

tools: setup slurm bubblewrap prometheus

golden: setup  ## what this tree computes, sends and starts, to the last bit, against a commit (BASE=HEAD)
	$(BIN)/python -m tests.golden $(BASE)

slurm: setup  ## a Slurm for its tests, unpacked into .venv, where Debian's packages can be had
	$(BIN)/python scripts/debian_tools.py slurm .venv/slurm

prometheus: setup  ## a Prometheus for its tests, unpacked into .venv, where Debian's package can be had
	$(BIN)/python scripts/debian_tools.py prometheus .venv/prometheus

campaign: setup bubblewrap  ## many seeded trials, and many more examples of each property (TRIALS=20)
	ASYNCRL_TRIALS=$(TRIALS) $(BIN)/pytest -q tests -m "campaign and not gpu and not multi_gpu"
	ASYNCRL_TRIALS=$(TRIALS) $(BIN)/pytest -q -n 2 tests/algo tests/extensions/plan tests/rollout tests/records tests/checkpoints -m "not integration and not campaign"

# In a folder of their own: verl's wheel holds packages named tests and scripts.
$(PEERS): pyproject.toml $(READY)
	$(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
	print(*p['project']['optional-dependencies']['peers'], sep='\n')" | xargs $(BIN)/pip install --quiet --no-deps --upgrade --target $@
	touch $@

peers: $(PEERS)  ## the algorithms against verl's and TRL's own functions
	PYTHONPATH=$(PEERS) $(BIN)/pytest -q tests/algo/test_peers.py

TE := .venv/te
$(TE): requirements/te.txt $(READY)
	rm -rf $@ && $(BIN)/pip install --quiet --no-deps --target $@ -r requirements/te.txt && touch $@

te-stub: $(TE)  ## TransformerEngine's layers on a CPU, with a stand-in for its compiled extension (0.7 GB in .venv/te)
	PYTHONPATH=$(CURDIR)/$(TE) ASYNCRL_ZYGOTE=tests.te_stub.zygote $(BIN)/pytest -q tests/te_stub

# An environment of its own, 6.5 GB: CUDA builds of torch and of what SGLang needs, before the packages of the CPU's.
$(CUDA)/.stamp: requirements/cuda.txt $(READY)
	$(BIN)/python -m venv --without-pip $(CUDA)
	$(BIN)/pip --python $(CUDA)/bin/python install --quiet --no-deps -r requirements/cuda.txt
	site=$$(cd $(CUDA) && echo lib/python3.*/site-packages) && echo ../../../../$$site > $(CUDA)/$$site/cpu.pth
	touch $@

$(STUBS)/libcuda.so.1: tests/cuda_stub/driver.c tests/cuda_stub/runtime.c
	mkdir -p $(STUBS)
	cc -shared -fPIC -w -o $(STUBS)/cuda_stub_runtime.so tests/cuda_stub/runtime.c
	cc -shared -fPIC -w -o $@ tests/cuda_stub/driver.c

cuda-stub: $(CUDA)/.stamp $(STUBS)/libcuda.so.1  ## the CUDA path without a GPU: fake tensors, compiled kernels (tests/cuda_stub/README.md)
	LD_PRELOAD=$(abspath $(STUBS))/cuda_stub_runtime.so LD_LIBRARY_PATH=$(abspath $(STUBS)) \
	$(CUDA)/bin/python -m pytest -q -n 2 $(ARGS) tests/cuda_stub

container:  ## the image for CPUs: the Dockerfile's steps in a clean root (as root; ARGS="--bind FILE ...")
	$(PYTHON) scripts/container_check.py $(ARGS)

fresh:  ## `make run` and `make test` on a clean Debian, as root and as another user (as root; ARGS="--bind FOLDER ...")
	$(PYTHON) scripts/fresh.py $(ARGS)

check: setup docs  ## format, lint, types, documentation, and the shape of the code
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy
	$(PYTEST) -n 2 tests/test_imports.py tests/test_names.py tests/test_docs.py -m structure

DOCS := .venv/.docs
$(DOCS): requirements/docs.txt $(READY)
	$(BIN)/pip install --quiet --no-deps -r requirements/docs.txt && touch $@

docs: $(DOCS)  ## the documentation as a site, in site/; a dead link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: setup bubblewrap  ## every scripts/bench_*.py for CPUs (BENCH_ARGS="...")
	set -e; for script in $(filter-out scripts/bench_gpu.py,$(wildcard scripts/bench_*.py)); do \
	$(BIN)/python $$script $(BENCH_ARGS); done

clean:  ## caches, builds and runs; .venv stays
	rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
