#!/usr/bin/env bash
# Starts Ray on one node of many, and a command on the first. Run the same line on every node; only RANK differs:
#
#   RANK=r NNODES=4 ray_start.sh -- python -m rltrain.main_ppo ...   the command runs on rank 0; the others stay until
#                                                                    it ends, and all end with its exit code
#   RANK=r NNODES=4 ray_start.sh           Ray alone: it goes on, and you start the command on rank 0
#   ray_start.sh head | worker [ADDRESS]   the same, without ranks
#   ray_start.sh stop [ADDRESS]            end what this script has started on this node, and nothing else;
#                                        a command saves first, and a second stop ends it at once
#
# Options before --: --nodes=4 (NNODES) and --devices=8 (those each node has to have; by default as many as the head)
# are waited for; all others go to `ray start`: --num-cpus=8 --temp-dir=/scratch/ray
# Environment: RANK, NODE_RANK or SLURM_NODEID; HEAD_FILE (a file on shared storage, by default .ray_head here), where
# the head leaves its address and token; HEAD_ADDRESS or MASTER_ADDR (host or host:port) where nothing is shared, then
# with RAY_AUTH_TOKEN; RAY_PORT or MASTER_PORT (6379); WAIT_S (360); NODE_IP (this node's address that others reach, by
# default that of the card that leads to the head); LAUNCH_ID (tells runs apart, by default the scheduler's job);
# EXIT_CODE_FILE (rank 0 leaves its code there); DASHBOARD=1 (DASHBOARD_HOST, 127.0.0.1); RESTARTS=20 (on all nodes: as
# often all of it is run again where that may help, see docs/recovery.md).
#
# Ray runs what it is sent, so a token keeps strangers out: RAY_AUTH_TOKEN, or a file RAY_AUTH_TOKEN_PATH, or
# ~/.ray/auth_token, which the head makes where there is none. Keep the cluster in a private network all the same.
set -euo pipefail

case "${1:-}" in -h | --help) sed -n '2,23s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;; esac
# Ray reads the first when it is imported. By itself it runs its workers at low priority.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" RAY_worker_niceness="${RAY_worker_niceness:-0}"
# Ray starts a process a core beforehand, which would serve nobody: a run's have environments of their own.
export RAY_prestart_worker_first_driver="${RAY_prestart_worker_first_driver:-0}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# The active environment, else the one that quickstart.sh and test.sh make.
for python in python python3 "$root/.venv/bin/python"; do
    if "$python" -c 'import importlib.util as each; each.find_spec("ray") or exit(1)' 2>/dev/null; then
        # A checkout that is not installed; what is installed, or lies here, comes first.
        [ ! -d "$root/rltrain" ] || export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$root"
        [ -z "${RESTARTS:-}" ] || exec "$python" -m rltrain.supervise --max-restarts "$RESTARTS" -- "$python" -m rltrain.runtime.launch "$@"
        exec "$python" -m rltrain.runtime.launch "$@"
    fi
done
echo "error: no python here has Ray. Activate the environment that rltrain is installed in." >&2
exit 2
