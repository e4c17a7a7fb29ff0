#!/usr/bin/env bash
#SBATCH --job-name=rltrain
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
# sbatch scripts/slurm.sh examples/grpo_7b_boba_64gpu.sh [key=value ...]
# A template: add partition, account and devices of your cluster. Five minutes before the time limit the run gets SIGTERM, saves and ends
# with exit code 75; the job is then put in the queue again (at most MAX_RESTARTS times, 20) and continues. A step that does not fit into
# trainer.stop_notice_s=280 is left for it: with another --signal set that key behind the script, 20 below the number there.
# One of two restarts it after a failure: the queue, on nodes of its choice; or with RESTARTS=20 the supervisor, at once and on the same
# nodes, up to that often. The queue is then for the time limit alone.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: sbatch scripts/slurm.sh LAUNCH_SCRIPT [key=value ...]" >&2; exit 2; }

cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"
export HEAD_FILE="$PWD/.ray_head_$SLURM_JOB_ID"
export RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}"
# Those of a shell that sbatch took over would say the same rank on every node.
unset RANK NODE_RANK NNODES HEAD_ADDRESS MASTER_ADDR NODE_IP
# The first node leaves its exit code here: srun's is the highest of all, be it of a node that was killed at the end.
export EXIT_CODE_FILE="$HEAD_FILE.code"
rm -f "$EXIT_CODE_FILE"
trap 'rm -f "$HEAD_FILE" "$HEAD_FILE.token" "$EXIT_CODE_FILE"' EXIT
launch="$1"
shift

# Every node runs ray_start.sh; the first is the head and runs the launch script. srun hands signals on to all of them.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 bash scripts/ray_start.sh -- bash "$launch" trainer.nnodes="$SLURM_NNODES" trainer.stop_notice_s=280 "$@" &
step=$!
asked=
trap 'asked=1; kill -TERM "$step" 2>/dev/null || true' TERM
code=0
wait "$step" || code=$?
# A signal cuts wait short; the run is still saving then.
while kill -0 "$step" 2>/dev/null; do
    code=0
    wait "$step" || code=$?
done
code="$(cat "$EXIT_CODE_FILE" 2>/dev/null || echo "$code")"
# Where there is a supervisor, a failure has used up its restarts already.
if [ "$code" = 75 ] && { [ -n "$asked" ] || [ -z "${RESTARTS:-}" ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_RESTARTS:-20}" ] && command -v scontrol >/dev/null; then
    scontrol requeue "$SLURM_JOB_ID" || true
fi
exit "$code"
