#!/usr/bin/env bash
# qwen3_30b_a3b_grpo.sh on one node of 16 NPUs of 64 GB (A3; with NNODES=2 two of 8 910B). Not run on hardware yet. New experts
# reach the engine with vllm-ascend 0.26 or later (docs/npu.md); the check after each sync would stop a run otherwise.
set -euo pipefail
export NNODES="${NNODES:-1}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/qwen3_30b_a3b_grpo.sh" \
    trainer.device=npu trainer.experiment_name=qwen3_30b_a3b_grpo_npu "$@"
