#!/usr/bin/env bash
# The tests of models and of the embedded engine with the transformers of the NPU set, the oldest that is supported, on
# PyTorch for CPU, in an environment of its own. Arguments go to pytest. (No vLLM for CPUs takes this transformers.)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
VENV="$REPO/.venv-oldest"
OLDEST="$(grep '^transformers==' "$REPO/scripts/constraints-npu.txt")"
setup_env dev,images "$OLDEST"
cd "$REPO"
[ $# -gt 0 ] || set -- tests/models tests/trainer/test_checkpoint.py tests/workers/test_{actor,hf_rollout,model_check,ranks,weight_sync}.py
PYTHONPATH="$REPO" exec "$PYTHON" -m pytest "$@"
