# `make demo` and `make test` set everything up by themselves; they need Python 3.10+ and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The lowest transformers release that pyproject.toml allows, in an environment of its own.
OLDEST := transformers==5.6.0
OLDEST_VENV := $(VENV)-oldest

.PHONY: demo test test-oldest lint clean

$(VENV)/.made: 
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/merging demo

test: $(VENV)/.test lint
	$(BIN)/python -m pytest

$(OLDEST_VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' '$(OLDEST)'
	touch $@

# What depends on transformers' insides: names in checkpoints, backbones, the walk through a model.
test-oldest: $(OLDEST_VENV)/.test
	$(OLDEST_VENV)/bin/python -m pytest tests/checkpoints tests/backbones tests/field_reports \
		tests/test_tracer.py tests/test_sweep.py tests/test_fates.py tests/test_poolers.py \
		tests/test_output_heads.py tests/test_adapters_that_peft_loads.py

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --no-incremental

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build dist *.egg-info
