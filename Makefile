PYTHON := $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

.PHONY: check test bench quickstart format

check:  ## format, lint, types, house rules
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy -p rltrain
	$(PYTHON) -m pytest -q tests/test_house_rules.py

test:  ## environment and all tests
	bash scripts/test.sh

bench:  ## tables under bench/
	$(PYTHON) -m bench.run
	$(PYTHON) -m bench.rollout
	$(PYTHON) -m bench.rewards
	$(PYTHON) -m bench.learning

quickstart:  ## environment, small model, GRPO until the reward has risen
	bash scripts/quickstart.sh

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .
