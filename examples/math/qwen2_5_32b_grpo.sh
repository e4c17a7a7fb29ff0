#!/usr/bin/env bash
# GRPO on DeepScaleR with Qwen2.5-32B, 4 nodes of 8 910B; on Atlas A3, 2 nodes of 16: NNODES=2. Not run on hardware yet.
# The recipe of the 7B model with the hyper-parameters of MindSpeed RL's configs/grpo_qwen25_32b_A3.yaml. Its A2 file has
# shorter answers: data.max_response_length=1024. Not theirs: as there.
# Nodes: docs/cluster.md
set -euo pipefail
export MODEL="${MODEL:-models/Qwen2.5-32B}"
FOLDER="$(dirname "${BASH_SOURCE[0]}")"
exec bash "$FOLDER/qwen2_5_7b_grpo.sh" \
    data.train_batch_size=64 data.max_prompt_length=1024 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=16 \
    trainer.nnodes="${NNODES:-4}" ray_kwargs.ray_init.address=auto trainer.total_training_steps=500 \
    trainer.experiment_name=qwen2_5_32b_grpo "$@"
