PYTHON := $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

.PHONY: check test bench bench-peers quickstart format

check:  ## format, lint, types, house rules
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy -p rltrain
	$(PYTHON) -m pytest -q tests/test_house_rules.py

test:  ## environment and all tests
	bash scripts/test.sh

bench:  ## tables under bench/results (bench/README.md)
	$(PYTHON) -m bench.phases
	$(PYTHON) -m bench.scale
	$(PYTHON) -m bench.rollout
	$(PYTHON) -m bench.weight_sync
	$(PYTHON) -m bench.rewards
	$(PYTHON) -m bench.learning

bench-peers:  ## whole steps against TRL, which is installed into .bench-env (a few GB) and, for pictures, .bench-env/images
	$(PYTHON) -m bench.step
	$(PYTHON) -m bench.step --kinds images --peers hf --dtype float32 --steps 1 --rounds 2 --out vision_step_cpu.md

quickstart:  ## environment, small model, GRPO until the reward has risen
	bash scripts/quickstart.sh

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .
