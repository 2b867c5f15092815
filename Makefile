# Every target installs what it needs on its own; a second call installs nothing. `make` lists the targets.
#
#   CANDIDATE=name   specialized (default) | stock | a mutant's id | module:factory
#   PROFILE=name     embedded | gpu | serving; default: gpu where a Hopper or Blackwell GPU can run the kernels, else embedded
#   CONFIG=file      settings, e.g. the two servers of the serving profile (`fasttrack init` writes one); default: validate.toml if it exists
#   QUIET=1          only problems and the result, for CI
#   FRESH=1          do not continue an interrupted run
#   R=run  E=record  for judge, report and repro
#   TORCH_INDEX=url  a package index of CPU wheels, where the default one would bring CUDA
#
# `make` turns every failure into its own exit code 2. The suite's codes (0 pass, 1 fail, 2 not proven, 3 error) are those of
# `.venv/bin/fasttrack`, and make prints them as "Error N".

.DEFAULT_GOAL := help
.PHONY: help setup validate test test-serving lint audit evals numerics perf mutants judge report repro clean

VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(if $(shell command -v $(name)),$(name))))
TORCH := torch==2.13.0
STAMP := $(VENV)/.installed-$(shell { cat pyproject.toml; echo "$(TORCH)"; } | cksum | cut -d" " -f1)
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
TORCH_OPTIONS := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED := 1

OPTIONS := $(if $(CONFIG),--config $(CONFIG)) $(if $(CANDIDATE),--candidate $(CANDIDATE)) $(if $(PROFILE),--profile $(PROFILE)) $(if $(QUIET),--quiet) $(if $(FRESH),--fresh)
SUITE := $(PY) -m validation

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install (minutes and about 2 GB once; network; no GPU)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "setup: got no python3, needs Python 3.11 or newer; install it or set PYTHON=" >&2; exit 3; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"setup: got Python {v[0]}.{v[1]}, needs 3.11 or newer; set PYTHON=")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -c 'import torch' 2>/dev/null || test -n "$(ALLOW_CUDA)" || $(PY) .ci/check_torch_wheel.py "$(TORCH)" $(TORCH_OPTIONS)
	@echo "setup: installing (once)"
	@$(PY) -c 'import torch' 2>/dev/null || $(PIP) "$(TORCH)" $(TORCH_OPTIONS)
	@$(PIP) --editable '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

validate: $(STAMP) ## The whole job: measure, judge, report (embedded profile: at most 15 minutes, 2 cores, 6 GiB, no GPU)
	@$(SUITE) run $(OPTIONS) $(if $(LANES),--lanes $(LANES))

test: $(STAMP) ## The tests of the suite itself (at most 12 minutes, 2 cores, no GPU)
	@$(PY) -m pytest -n 2 --dist loadfile $(PYTEST)

test-serving: $(STAMP) ## Tests with real vLLM servers on the CPU (15 minutes, 2 cores, 5 GiB; once 3.5 GB into .venv-serving; network)
	@$(PY) -m tests.serving $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(PYTEST)

lint: $(STAMP) ## ruff, mypy and the import rule (a minute, no GPU)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-cache

audit: $(STAMP) ## Memory-ordering audit of sources and binaries (minutes, no GPU)
	@$(SUITE) audit $(ARGS)

evals: $(STAMP) ## The evals lane alone: four suites and the one-standard-error gate (minutes, 2 cores, no GPU)
	@$(SUITE) run $(OPTIONS) --lanes evals

numerics: $(STAMP) ## The numerics lane alone: sublayers, end to end, per token up to 1,048,575 positions (3 minutes, 2 cores, no GPU)
	@$(SUITE) run $(OPTIONS) --lanes numerics

perf: $(STAMP) ## The speed matrix: published GPU records, projections, and the nano engine timed here (2 minutes, no GPU)
	@$(SUITE) run $(OPTIONS) --lanes perf

mutants: $(STAMP) ## Wrong candidates and the checks that must kill them (at most 12 minutes, 2 cores, no GPU)
	@$(SUITE) mutants $(ARGS)

judge: $(STAMP) ## Judge a stored run again, R=run or the newest (seconds, no GPU)
	@$(SUITE) judge $(R)

report: $(STAMP) ## Render a stored run's report again, R=run folder or the newest (seconds, no GPU)
	@$(PY) -m reports $(or $(R),$(lastword $(sort $(wildcard reports/runs/R-*))))

repro: $(STAMP) ## Measure one record again and compare, E=E-... from any report (as long as that measurement took; its hardware)
	@test -n "$(E)" || { echo "repro: got no record, needs E=E-..., an id from a report" >&2; exit 3; }
	@$(SUITE) repro $(E)

clean: ## Remove caches and scratch; runs and .venv stay (seconds)
	@rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
