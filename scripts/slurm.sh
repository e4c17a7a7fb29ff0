#!/usr/bin/env bash
#SBATCH --job-name=rltrain
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
# sbatch scripts/slurm.sh examples/grpo_7b_boba_64gpu.sh [key=value ...]
# A template: add partition, account and devices of your cluster. Five minutes before the time limit the run gets SIGTERM, saves and ends
# with exit code 75; the job is then put in the queue again (at most MAX_RESTARTS times, 20) and continues.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: sbatch scripts/slurm.sh LAUNCH_SCRIPT [key=value ...]" >&2; exit 2; }

cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"
export HEAD_FILE="$PWD/.ray_head_$SLURM_JOB_ID"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}"
trap 'rm -f "$HEAD_FILE"; kill "${ray:-}" 2>/dev/null || true' EXIT
driver=
asked=
# The whole process group: a launch script that does not exec would end alone, and leave the run behind without a word.
stop() {
    [ -n "$driver" ] || exit 75
    asked=1
    kill -TERM -- "-$driver" 2>/dev/null || true
}
trap stop TERM

# Ray keeps running inside a step of its own on every node; node 0 is the head.
srun --overlap bash -c 'RANK=$SLURM_NODEID bash scripts/ray_start.sh && sleep infinity' &
ray=$!
until=$((SECONDS + ${WAIT_S:-360}))
while [ ! -s "$HEAD_FILE" ]; do
    [ "$SECONDS" -lt "$until" ] || { echo "error: no Ray head after ${WAIT_S:-360} s; see what ray_start.sh printed above" >&2; exit 1; }
    sleep 1
done

launch="$1"
shift
setsid bash "$launch" trainer.nnodes="$SLURM_NNODES" ray_kwargs.ray_init.address="$(cat "$HEAD_FILE")" "$@" &
driver=$!
code=0
wait "$driver" || code=$?
# A signal cuts wait short; the run is still saving then.
while kill -0 "$driver" 2>/dev/null; do
    code=0
    wait "$driver" || code=$?
done
# What a launch script that did not exec has left behind.
while kill -0 -- "-$driver" 2>/dev/null; do sleep 0.2; done
[ -z "$asked" ] || [ "$code" -ne 143 ] || code=75
if [ "$code" = 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_RESTARTS:-20}" ] && command -v scontrol >/dev/null; then
    scontrol requeue "$SLURM_JOB_ID" || true
fi
exit "$code"
