# Everything a person types here. Each target makes the venv it needs.

PYTHON ?= python3
VENV := .venv
PADDLES := 2.6.2 3.0.0 3.1.1 3.2.2 3.3.1
# Paddle 2.6 was built against numpy 1.
NUMPY_2.6.2 := numpy<2

# Programs of public reports, if they are there: see tests/versions.py.
CASES ?= $(wildcard ../shared/cases)

# Model libraries that call recompute, each with the Paddle that it was made for.
CLIENTS := paddleformers paddlenlp
NEEDS_paddleformers := 'paddleformers==1.2.0' 'paddlepaddle==3.3.1'
NEEDS_paddlenlp := 'paddlenlp==2.8.1' 'paddlepaddle==3.0.0' 'huggingface_hub<0.26' \
  'datasets<3' 'aistudio_sdk<0.3' 'pyarrow<19'

.PHONY: help dev demo examples test test-wheel fuzz mutants audit lint types changelog dist docs docs-serve bench bench-docs check \
  test-versions test-clients test-distributed clean

help:
	@echo "dev            what a change needs: .venv with Paddle and all tools, and the hooks of git"
	@echo "demo           install paramproxy with CPU Paddle, run the doctor"
	@echo "examples       what is in examples/: main_grad, own checkpointing, policies, memory, a LLaMA"
	@echo "test           install the test extras, run the whole suite, or TESTS='tests/test_leaf.py'"
	@echo "test-wheel     the whole suite on the wheel, in an empty venv, no source in reach"
	@echo "fuzz           thousands of random programs, others each time: PROGRAMS=3000"
	@echo "mutants        the suite on mutants of the package, on which it has to fail"
	@echo "audit          what is known against the dependencies (needs the internet)"
	@echo "test-versions  suite and random programs on Paddle $(PADDLES),"
	@echo "               a venv for each, and the table of the docs"
	@echo "test-clients   PaddleFormers, PaddleNLP and ERNIE train under paramproxy.patch()"
	@echo "test-distributed  two processes: data, tensor, sharding and pipeline parallelism"
	@echo "lint types     ruff, codespell, zizmor, the changelog renders; mypy, strict"
	@echo "changelog      what the next release will say has changed"
	@echo "dist docs      build and check sdist and wheel; build the docs into site/"
	@echo "bench          every cost beside Paddle's own, in one table of ratios"
	@echo "bench-docs     the same, with the tables and the pictures of the docs"
	@echo "check          lint types test dist docs"

dev: $(VENV)/test.stamp $(VENV)/lint.stamp $(VENV)/dev.stamp
	$(VENV)/bin/pre-commit install

demo: $(VENV)/cpu.stamp
	$(VENV)/bin/python -m paramproxy

examples: $(VENV)/test.stamp .venvs/paddleformers/client.stamp
	for each in fused_main_grad own_checkpointing selective; do \
	  $(VENV)/bin/python -W ignore examples/$$each.py || exit 1; done
	$(VENV)/bin/python -W ignore examples/memory.py --svg memory.svg
	.venvs/paddleformers/bin/python -W ignore examples/tiny_llama.py --plain
	-.venvs/paddleformers/bin/python -W ignore examples/tiny_llama.py 2>&1 | tail -1
	.venvs/paddleformers/bin/python -W ignore -m paramproxy run examples/tiny_llama.py

test: $(VENV)/test.stamp
	$(VENV)/bin/python -m pytest $(TESTS)

test-wheel: dist
	$(PYTHON) tests/released.py dist

fuzz: $(VENV)/test.stamp
	$(VENV)/bin/python -X faulthandler -m pytest -q tests/test_programs.py --hypothesis-profile=fuzz

mutants: $(VENV)/test.stamp
	$(VENV)/bin/python tests/mutants.py

audit: $(VENV)/audit.stamp
	$(VENV)/bin/python -m pip_audit --skip-editable

lint: $(VENV)/lint.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	$(VENV)/bin/zizmor --offline --quiet .github
	$(VENV)/bin/towncrier build --draft > /dev/null

changelog: $(VENV)/lint.stamp
	$(VENV)/bin/towncrier build --draft

types: $(VENV)/test.stamp $(VENV)/lint.stamp
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy tests/typed.py

dist: $(VENV)/dist.stamp
	rm -rf dist
	$(VENV)/bin/validate-pyproject pyproject.toml
	$(VENV)/bin/python -m build --outdir dist .
	$(VENV)/bin/twine check --strict dist/*
	$(VENV)/bin/check-wheel-contents dist

docs: $(VENV)/docs.stamp
	$(VENV)/bin/mkdocs build --strict

docs-serve: $(VENV)/docs.stamp
	$(VENV)/bin/mkdocs serve

bench: $(VENV)/cpu.stamp
	$(VENV)/bin/python -W ignore bench

bench-docs: $(VENV)/bench.stamp
	$(VENV)/bin/python -W ignore bench --json bench/results.json
	$(VENV)/bin/python bench/chart.py bench/results.json docs/assets
	$(VENV)/bin/python -W ignore examples/memory.py --svg docs/assets/memory.svg

check: lint types test dist docs

# The version that is installed is the one of the file.
$(VENV)/%.stamp: pyproject.toml paramproxy/_version.py | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable '.[cpu,$*]'
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

test-versions: $(PADDLES:%=test-paddle-%)
	$(PYTHON) tests/versions.py table

test-paddle-%: .venvs/%/test.stamp
	.venvs/$*/bin/python tests/versions.py run $(CASES:%=--cases %)

.venvs/%/test.stamp: pyproject.toml paramproxy/_version.py
	$(PYTHON) -m venv .venvs/$*
	.venvs/$*/bin/python -m pip install --quiet --editable '.[test]' 'paddlepaddle==$*' '$(or $(NUMPY_$*),numpy)'
	touch $@

test-clients: $(CLIENTS:%=test-client-%)

test-client-%: .venvs/%/client.stamp
	.venvs/$*/bin/python -m pytest -q -W ignore tests/clients/$*

.venvs/%/client.stamp: pyproject.toml Makefile
	$(PYTHON) -m venv .venvs/$*
	.venvs/$*/bin/python -m pip install --quiet --editable '.[test]' $(NEEDS_$*)
	touch $@

test-distributed: $(VENV)/test.stamp
	$(VENV)/bin/python -m pytest -q tests/distributed

clean:
	rm -rf $(VENV) .venvs dist site .mypy_cache .pytest_cache .ruff_cache
