#!/usr/bin/env bash
# GRPO on DeepScaleR with Qwen3-30B-A3B (a mixture of experts), 2 nodes of 8 GPUs of 80 GB. Not run on hardware yet.
# On NPUs: qwen3_30b_a3b_grpo_npu.sh. The recipe of Qwen2.5-7B with the batch of Qwen2.5-32B. It is not a published recipe.
# Experts stay on the devices of a node (docs/moe.md). One node is enough: NNODES=1. Nodes: docs/cluster.md
set -euo pipefail
export MODEL="${MODEL:-models/Qwen3-30B-A3B}"
FOLDER="$(dirname "${BASH_SOURCE[0]}")"
exec bash "$FOLDER/qwen2_5_7b_grpo.sh" \
    data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.fsdp_config.expert_parallel_size=8 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=16 \
    trainer.device=cuda trainer.nnodes="${NNODES:-2}" ray_kwargs.ray_init.address=auto \
    trainer.experiment_name=qwen3_30b_a3b_grpo "$@"
