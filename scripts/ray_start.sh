#!/usr/bin/env bash
# Starts Ray on one node of many. Run it on every node, then the training command on one of them (trainer.nnodes=N
# ray_kwargs.ray_init.address=auto).
#
#   ray_start.sh head                 this node is the head; writes its address to HEAD_FILE when that is set
#   ray_start.sh worker [ADDRESS]     this node joins ADDRESS, HEAD_ADDRESS, or what HEAD_FILE says
#   RANK=r ray_start.sh               head on rank 0, worker elsewhere
#
# Environment: HEAD_FILE (a file on shared storage), HEAD_ADDRESS (host or host:port), RAY_PORT (6379), WAIT_S (360).
# Ray runs what it is sent: keep the cluster in a private network. With RAY_AUTH_MODE=token every node needs the same token
# (RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH).
set -euo pipefail

PORT="${RAY_PORT:-6379}"
WAIT_S="${WAIT_S:-360}"
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" RAY_worker_niceness="${RAY_worker_niceness:-0}"

fail() { echo "error: $*" >&2; exit 2; }
usage() { sed -n '2,10p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; }

role="${1:-}"
if [ -z "$role" ] && [ -n "${RANK:-}" ]; then
    [ "$RANK" = 0 ] && role=head || role=worker
fi

# Ray counts GPUs itself; NPUs only where CANN's Python package is installed, so tell it.
resources=()
if devices=$(compgen -G '/dev/davinci[0-9]*'); then
    resources=(--resources "{\"NPU\": $(wc -l <<<"$devices")}")
fi

case "$role" in
head)
    ip="$(hostname -I 2>/dev/null | awk '{print $1}')"
    [ -n "$ip" ] || fail "this node's address is not known: 'hostname -I' prints nothing"
    ray start --head --node-ip-address="$ip" --port="$PORT" --include-dashboard=false "${resources[@]}"
    if [ -n "${HEAD_FILE:-}" ]; then
        echo "$ip:$PORT" >"$HEAD_FILE.tmp" && mv "$HEAD_FILE.tmp" "$HEAD_FILE"
        echo "head address $ip:$PORT written to $HEAD_FILE"
    fi
    ;;
worker)
    address="${2:-${HEAD_ADDRESS:-}}"
    [ -n "$address" ] || [ -n "${HEAD_FILE:-}" ] || fail "a worker needs the head's address: ray_start.sh worker ADDRESS, HEAD_ADDRESS or HEAD_FILE"
    waited=0
    while [ -z "$address" ]; do
        [ -s "$HEAD_FILE" ] && address="$(cat "$HEAD_FILE")" && break
        [ "$waited" -lt "$WAIT_S" ] || fail "no head address in $HEAD_FILE after $WAIT_S s. Is the head up, and is this storage shared?"
        [ $((waited % 30)) -ne 0 ] || echo "waiting for the head's address in $HEAD_FILE ($((WAIT_S - waited)) s left)"
        sleep 1
        waited=$((waited + 1))
    done
    [[ "$address" == *:* ]] || address="$address:$PORT"
    echo "joining $address"
    ray start --address="$address" "${resources[@]}"
    ;;
-h | --help) usage ;;
"") usage >&2 && fail "say head or worker, or set RANK" ;;
*) fail "'$role' is neither head nor worker" ;;
esac
