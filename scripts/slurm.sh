#!/usr/bin/env bash
#SBATCH --job-name=rltrain
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
# sbatch scripts/slurm.sh examples/grpo_7b_boba_64gpu.sh [key=value ...]
# A template: add partition, account and devices of your cluster. Five minutes before the time limit the run gets SIGTERM, saves and ends;
# the same job, submitted again, continues.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: sbatch scripts/slurm.sh LAUNCH_SCRIPT [key=value ...]" >&2; exit 2; }

cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"
export HEAD_FILE="$PWD/.ray_head_$SLURM_JOB_ID"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}"
trap 'rm -f "$HEAD_FILE"' EXIT

# Ray keeps running inside a step of its own on every node; node 0 is the head.
srun --overlap bash -c 'RANK=$SLURM_NODEID bash scripts/ray_start.sh && sleep infinity' &
until=$((SECONDS + ${WAIT_S:-360}))
while [ ! -s "$HEAD_FILE" ]; do
    [ "$SECONDS" -lt "$until" ] || { echo "error: no Ray head after ${WAIT_S:-360} s; see what ray_start.sh printed above" >&2; exit 1; }
    sleep 1
done

launch="$1"
shift
bash "$launch" trainer.nnodes="$SLURM_NNODES" ray_kwargs.ray_init.address="$(cat "$HEAD_FILE")" "$@" &
driver=$!
trap 'kill -TERM "$driver"' TERM
code=0
wait "$driver" || code=$?
# wait returns early when the signal comes; the run is still saving then.
if kill -0 "$driver" 2>/dev/null; then wait "$driver" || code=$?; fi
exit "$code"
