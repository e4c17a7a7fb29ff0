#!/usr/bin/env bash
# DAPO with Qwen3-30B-A3B (a mixture of experts), 2 nodes of 8 GPUs of 80 GB. Not run on hardware yet.
# On NPUs: trainer.device=npu, with vllm-ascend 0.26 or later (docs/npu.md). The hyper-parameters are those of MindSpeed RL's configs/dapo_qwen3_30b_a3b_A3.yaml. Not
# theirs: the dual clip at 10 (they have none), the scorer, and sizes of memory and parallelism.
# Nodes: docs/cluster.md
set -euo pipefail
export MODEL="${MODEL:-models/Qwen3-30B-A3B}"
FOLDER="$(dirname "${BASH_SOURCE[0]}")"
exec bash "$FOLDER/qwen2_5_7b_dapo.sh" \
    algorithm.filter_groups.max_num_gen_batches=0 \
    data.gen_batch_size=32 data.train_batch_size=32 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    data.max_response_length=2048 reward_model.overlong_buffer.len=512 reward_model.overlong_buffer.penalty_factor=0.1 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=0 \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    trainer.device=cuda trainer.nnodes="${NNODES:-2}" ray_kwargs.ray_init.address=auto \
    trainer.total_training_steps=200 trainer.save_freq=100 trainer.experiment_name=qwen3_30b_a3b_dapo "$@"
