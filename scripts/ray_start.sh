#!/usr/bin/env bash
# Starts Ray on one node of many. Run it on every node, then the training command on the head (trainer.nnodes=N
# ray_kwargs.ray_init.address=auto). `ray stop` on every node ends it.
#
#   ray_start.sh head [ARGS]               this node is the head; writes its address to HEAD_FILE when that is set
#   ray_start.sh worker [ADDRESS] [ARGS]   this node joins ADDRESS, HEAD_ADDRESS, or what HEAD_FILE says
#   RANK=r ray_start.sh                    head on rank 0, worker elsewhere
#
# ARGS, which begin with --, are handed to `ray start`: --num-cpus=8 --temp-dir=/scratch/ray
# Environment: HEAD_FILE (a file on shared storage), HEAD_ADDRESS (host or host:port), RAY_PORT (6379), WAIT_S (360),
# NODE_IP (the address of this node that others reach; the first of `hostname -I`, which may be a bridge of containers).
#
# Ray runs what it is sent, so a token keeps strangers out (RAY_AUTH_MODE=token): RAY_AUTH_TOKEN, or a file RAY_AUTH_TOKEN_PATH, or
# ~/.ray/auth_token, which the head makes where there is none. Workers also find it in HEAD_FILE.token, which the head writes for its
# user alone. Keep the cluster in a private network all the same.
set -euo pipefail

PORT="${RAY_PORT:-6379}"
WAIT_S="${WAIT_S:-360}"
TOKEN_FILE="${HEAD_FILE:+$HEAD_FILE.token}"
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" RAY_worker_niceness="${RAY_worker_niceness:-0}"

fail() { echo "error: $*" >&2; exit 2; }
usage() { sed -n '2,15p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; }

role="${1:-}"
[ $# -eq 0 ] || shift
if [ -z "$role" ] && [ -n "${RANK:-}" ]; then
    [ "$RANK" = 0 ] && role=head || role=worker
fi

# The command of the active environment, else of the one that quickstart.sh and test.sh make.
own="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/ray"
ray="$(command -v ray || true)"
[ -n "$ray" ] || [ ! -x "$own" ] || ray="$own"
need_ray() { [ -n "$ray" ] || fail "there is no 'ray' command. Activate the environment that rltrain is installed in."; }

# Ray counts GPUs itself; NPUs only where CANN's Python package is installed, so tell it.
resources=()
if devices=$(compgen -G '/dev/davinci[0-9]*'); then
    resources=(--resources "{\"NPU\": $(wc -l <<<"$devices")}")
fi

token_given() { [ "$RAY_AUTH_MODE" != token ] || [ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]; }
# write FILE TEXT: whole or not at all, and readable for this user alone
write() { (umask 077 && mkdir -p "$(dirname "$1")" && printf '%s\n' "$2" >"$1.tmp.$$" && mv "$1.tmp.$$" "$1"); }

case "$role" in
head)
    need_ray
    ip="${NODE_IP:-$(hostname -I 2>/dev/null | awk '{print $1}')}"
    [ -n "$ip" ] || fail "this node's address is not known: 'hostname -I' prints nothing"
    # What an earlier head has left behind is not for the workers of this one.
    [ -z "${HEAD_FILE:-}" ] || rm -f "$HEAD_FILE" "$TOKEN_FILE"
    if ! token_given; then
        [ -s "$HOME/.ray/auth_token" ] || write "$HOME/.ray/auth_token" "$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')"
        [ -z "${HEAD_FILE:-}" ] || write "$TOKEN_FILE" "$(cat "$HOME/.ray/auth_token")"
    fi
    "$ray" start --head --node-ip-address="$ip" --port="$PORT" --include-dashboard=false "${resources[@]}" "$@"
    if [ -n "${HEAD_FILE:-}" ]; then
        echo "$ip:$PORT" >"$HEAD_FILE.tmp" && mv "$HEAD_FILE.tmp" "$HEAD_FILE"
        echo "head address $ip:$PORT written to $HEAD_FILE"
    fi
    ;;
worker)
    need_ray
    address="${HEAD_ADDRESS:-}"
    if [ $# -gt 0 ] && [[ "$1" != --* ]]; then address="$1" && shift; fi
    [ -n "$address" ] || [ -n "${HEAD_FILE:-}" ] || fail "a worker needs the head's address: ray_start.sh worker ADDRESS, HEAD_ADDRESS or HEAD_FILE"
    waited=0
    while [ -z "$address" ]; do
        # A file that an earlier head has left behind names an address where nobody answers.
        said="$(cat "$HEAD_FILE" 2>/dev/null || true)"
        if [ -n "$said" ] && timeout 3 bash -c ": <>/dev/tcp/${said%:*}/${said##*:}" 2>/dev/null; then address="$said" && break; fi
        [ "$waited" -lt "$WAIT_S" ] || fail "no head address in $HEAD_FILE after $WAIT_S s, or none that answers. Is the head up, and is this storage shared?"
        [ $((waited % 30)) -ne 0 ] || echo "waiting for the head's address in $HEAD_FILE ($((WAIT_S - waited)) s left)"
        sleep 1
        waited=$((waited + 1))
    done
    [[ "$address" == *:* ]] || address="$address:$PORT"
    if ! token_given; then
        if [ -s "$TOKEN_FILE" ]; then
            RAY_AUTH_TOKEN="$(cat "$TOKEN_FILE")" && export RAY_AUTH_TOKEN
        elif [ ! -s "$HOME/.ray/auth_token" ]; then
            fail "this node has not the head's token. Copy ~/.ray/auth_token from the head, or set HEAD_FILE (on shared storage) or RAY_AUTH_TOKEN on every node"
        fi
    fi
    echo "joining $address"
    "$ray" start --address="$address" ${NODE_IP:+--node-ip-address="$NODE_IP"} "${resources[@]}" "$@"
    ;;
-h | --help) usage ;;
"") usage >&2 && fail "say head or worker, or set RANK" ;;
*) fail "'$role' is neither head nor worker" ;;
esac
