#!/usr/bin/env bash
# GRPO on Geometry3K with Qwen3-VL-30B-A3B (a mixture of experts), 2 nodes of 8 GPUs of 80 GB. Not run on hardware yet.
# On NPUs: ../vlm_npu/qwen3_vl_30b_a3b_geometry3k_grpo.sh. Batch, lengths, KL and learning rate are those of verl's
# run_qwen3_vl_30b-fsdp2_npu.sh; sizes of memory and parallelism are not. Experts stay on the devices of a node.
# Data: python -m rltrain.data_preprocess.geometry3k --output data/geometry3k
# Nodes: docs/cluster.md
set -euo pipefail
DATA="${DATA:-data/geometry3k}"
MODEL="${MODEL:-models/Qwen3-VL-30B-A3B-Instruct}"

exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 data.max_prompt_length=1024 data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.fsdp_config.expert_parallel_size=8 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=5 \
    trainer.device=cuda trainer.nnodes="${NNODES:-2}" ray_kwargs.ray_init.address=auto \
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 \
    trainer.project_name=geometry3k trainer.experiment_name=qwen3_vl_30b_a3b_grpo "$@"
