#!/usr/bin/env bash
# GRPO on DeepScaleR with GLM-4.5 (a mixture of experts of 355 billion parameters), 8 nodes of 8 GPUs of 141 GB (H200). Not
# run on hardware yet. The settings of qwen3_30b_a3b_grpo.sh, which are not published for this model. One engine per node: in
# bfloat16 it takes 82 GiB of each device. Experts stay on the devices of a node (docs/moe.md). Nodes: docs/cluster.md
set -euo pipefail
export MODEL="${MODEL:-models/GLM-4.5}"
FOLDER="$(dirname "${BASH_SOURCE[0]}")"
export NNODES="${NNODES:-8}"
exec bash "$FOLDER/qwen3_30b_a3b_grpo.sh" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    trainer.experiment_name=glm_4_5_grpo "$@"
