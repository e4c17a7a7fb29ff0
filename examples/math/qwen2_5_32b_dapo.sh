#!/usr/bin/env bash
# DAPO with Qwen2.5-32B, 8 nodes of 8 910B; on Atlas A3, 4 nodes of 16: NNODES=4. Not run on hardware yet.
# The recipe of the 7B model with the hyper-parameters of MindSpeed RL's configs/dapo_qwen25_32b_A2_20k.yaml. Not theirs:
# dynamic sampling (off there; algorithm.filter_groups.enable=False), the dual clip at 10 (they have none), the scorer, and
# sizes of memory and parallelism. On A3 they publish answers of 30720 tokens.
# Nodes: docs/cluster.md
set -euo pipefail
export MODEL="${MODEL:-models/Qwen2.5-32B}"
FOLDER="$(dirname "${BASH_SOURCE[0]}")"
exec bash "$FOLDER/qwen2_5_7b_dapo.sh" \
    algorithm.filter_groups.max_num_gen_batches=0 \
    data.gen_batch_size=512 data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=0 'actor_rollout_ref.actor.optim.betas=[0.9,0.95]' \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    trainer.nnodes="${NNODES:-8}" ray_kwargs.ray_init.address=auto \
    trainer.total_training_steps=200 trainer.save_freq=50 trainer.experiment_name=qwen2_5_32b_dapo "$@"
