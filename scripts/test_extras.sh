#!/usr/bin/env bash
# The tests that skip without packages which hardly anybody needs all of: every tracker, Ray with its dashboard, and
# lm-evaluation-harness. In an environment of its own. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
VENV="$REPO/.venv-extras"
setup_env dev,trackers,dashboard,lm-eval
cd "$REPO"
[ $# -gt 0 ] || set -- tests/trainer/test_tracking.py tests/hosts/test_running_cluster.py tests/serve/test_lm_eval.py
PYTHONPATH="$REPO" exec "$PYTHON" -m pytest "$@"
