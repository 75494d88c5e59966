# Needs make, Python 3.11 or newer, and a package index that pip can reach.
#
#   make PYTHON=/path/to/python3 ...    another interpreter than the newest one found
#   make test ARGS="-x -k name"         further pytest options
#   make test-all SHARD=3/8             the third of eight parts
#
# The newest Python for which the locks have packages: newer Pythons get newer releases of JAX, and from
# 0.11 on JAX keeps on a CPU, too, the barriers that plans rest on.
ifndef PYTHON
PYTHON := $(or $(shell requirements/find-python.sh 3.11 3.14),python3)
endif
WORKERS ?= 2
ARGS ?=
SHARD ?= 1/1

BIN := .venv/bin
LATEST := .venv-latest/bin
PIP := -m pip --disable-pip-version-check

# Newer JAX releases need Python 3.12, so there is one lock for 3.11 and one for all after it.
PYVERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
LOCK := requirements/$(if $(filter 3.11,$(PYVERSION)),py311,py312).lock
# The version is in the name, so that another interpreter makes the environment anew.
STAMP := .venv/.installed-$(PYVERSION)

.PHONY: help venv test test-all test-latest fuzz golden lint format lock demo bench fig4 clean
.DEFAULT_GOAL := help

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## Make .venv from the lock, if it is not up to date

$(STAMP): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Moonwalk needs Python 3.11 or newer, but '$(PYTHON)' is" \
			"$(if $(PYVERSION),Python $(PYVERSION),no working Python)." \
			"Name another one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@echo "Installing $(LOCK) into .venv"
	@$(BIN)/python -c 'import pip, sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(PYVERSION)")' \
		2>/dev/null || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python $(PIP) install --quiet --requirement $(LOCK)
	@$(BIN)/python $(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

test: venv ## Run the tests, without the slow ones
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

test-all: venv ## Run all the tests, or a part of them: SHARD=3/8
	$(BIN)/python -m pytest -n $(WORKERS) --shard=$(SHARD) $(ARGS)

SEEDS ?= 0:1000
fuzz: venv ## Compare every method with JAX on random networks; SEEDS=0:10000 SHARD=1/8
	@mkdir -p build
	PYTHONPATH=tests $(BIN)/python -m zoo --seeds $(SEEDS) --shard $(SHARD) --out build/zoo-$(subst /,-,$(SHARD)).json $(ARGS)

golden: venv ## Compare plans, programs and memory with tests/golden.json; WRITE=1 takes what there is
	PYTHONPATH=tests $(BIN)/python tests/golden.py $(if $(WRITE),--write) $(ARGS)

test-latest: ## Run the tests with the newest releases, unlocked, on Python 3.12 or newer
	@python=$$(requirements/find-python.sh 3.12 3.99) || { \
		echo "No Python 3.12 or newer was found, so nothing was tested."; exit 0; }; \
	set -e; \
	$(LATEST)/python $(PIP) --version >/dev/null 2>&1 || "$$python" -m venv --clear .venv-latest; \
	$(LATEST)/python $(PIP) install --quiet --upgrade --upgrade-strategy eager \
		--editable '.[cli,plots,dev]'; \
	$(LATEST)/python --version; \
	$(LATEST)/python $(PIP) freeze | grep -iE '^(jax|jaxlib|equinox|lineax|jaxtyping|optax|flax)=='; \
	$(LATEST)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

lint: venv ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: venv ## Fix style and formatting in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## Resolve the dependencies anew and rewrite the locks (needs Python 3.11 and 3.12)
	requirements/lock.sh

demo: venv ## Train a network on MNIST-1D by backpropagation and by Moonwalk
	$(BIN)/python examples/demo.py

bench: venv ## Measure every method side by side, into build/bench; ARGS="engine", ARGS="--all --quick"
	$(BIN)/moonwalk bench $(or $(ARGS),--all) --out build/bench

# DATA: a folder with the files of Fashion-MNIST, or another data set's (NAME=cifar10).
NAME ?= fashion-mnist
fig4: venv ## Train the paper's Fig. 4 with DATA=folder, and draw it
	@test -n "$(DATA)" || { echo "Name the folder of the data: make fig4 DATA=... [NAME=cifar10]" >&2; exit 1; }
	@mkdir -p build
	@test -f build/$(NAME).npz || $(BIN)/python -m moonwalk.lab.data $(NAME) $(DATA) build/$(NAME).npz
	$(BIN)/moonwalk bench fig4 --data build/$(NAME).npz --out build/fig4-$(NAME) $(ARGS)

clean: ## Remove the environments, caches and builds
	rm -rf .venv .venv-latest .pytest_cache .hypothesis .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
