#!/usr/bin/env bash
# GRPO on DeepScaleR with DeepSeek-V3 (a mixture of experts of 671 billion parameters), 16 nodes of 8 GPUs of 288 GB (B300).
# Not run on hardware yet. The settings of qwen3_30b_a3b_grpo.sh, which are not published for this model. MODEL has the
# weights in bfloat16 (the published ones are FP8). One engine per node takes 156 GiB of each device: GPUs of 80 or 141 GB
# would need engines that span nodes, or FP8 weights in the engine, and rltrain has neither. Experts over four nodes
# (docs/moe.md). Nodes: docs/cluster.md
set -euo pipefail
export MODEL="${MODEL:-models/DeepSeek-V3-bf16}"
FOLDER="$(dirname "${BASH_SOURCE[0]}")"
export NNODES="${NNODES:-16}"
exec bash "$FOLDER/qwen3_30b_a3b_grpo.sh" \
    actor_rollout_ref.actor.fsdp_config.expert_parallel_size=32 actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 actor_rollout_ref.rollout.gpu_memory_utilization=0.75 \
    trainer.experiment_name=deepseek_v3_grpo "$@"
