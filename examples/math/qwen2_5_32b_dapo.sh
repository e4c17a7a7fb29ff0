#!/usr/bin/env bash
# DAPO with Qwen2.5-32B, 8 nodes of 8 910B; on Atlas A3, 4 nodes of 16: NNODES=4. Not run on hardware yet.
# The recipe of the 7B model; what is set here are the hyper-parameters that MindSpeed RL publishes for 32B, and its sizes.
# Nodes: docs/cluster.md
set -euo pipefail
export MODEL="${MODEL:-models/Qwen2.5-32B}"
FOLDER="$(dirname "${BASH_SOURCE[0]}")"
exec bash "$FOLDER/qwen2_5_7b_dapo.sh" \
    data.gen_batch_size=512 data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    trainer.nnodes="${NNODES:-8}" ray_kwargs.ray_init.address=auto trainer.experiment_name=qwen2_5_32b_dapo "$@"
