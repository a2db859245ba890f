# make demo    trains and evaluates EAST on data that it makes itself
# make test    lint and the whole test suite
# Both make .venv and install what they need. PYTHON=python3.12 chooses another interpreter.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN = .venv/bin
DEMO = demo

.PHONY: demo test clean

$(BIN)/.installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(BIN)/.installed-dev: requirements-dev.txt $(BIN)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

test: $(BIN)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest

clean:
	rm -rf .venv $(DEMO)
