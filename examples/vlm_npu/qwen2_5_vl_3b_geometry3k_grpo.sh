#!/usr/bin/env bash
# GRPO on Geometry3K with Qwen2.5-VL-3B, one node of 8 NPUs, vLLM (vllm-ascend). Not run on hardware yet.
# On GPUs: trainer.device=cuda
# Data: python -m rltrain.data_preprocess.geometry3k --output data/geometry3k
# Hyper-parameters of AReaL's recipe of this name; examples/README.md lists the differences.
set -euo pipefail
DATA="${DATA:-data/geometry3k}"
MODEL="${MODEL:-models/Qwen2.5-VL-3B-Instruct}"

# 2,101 problems are 65 steps an epoch: each is tested and saved. 200,704 pixels are 448 x 448.
exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=5.0 \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" data.max_pixels=200704 \
    data.train_batch_size=32 data.max_prompt_length=1024 data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.clip_ratio_low=0.4 actor_rollout_ref.actor.clip_ratio_high=0.4 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    trainer.device=npu trainer.n_gpus_per_node=8 trainer.save_freq=65 trainer.test_freq=65 trainer.total_epochs=3 \
    trainer.project_name=geometry3k trainer.experiment_name=qwen2_5_vl_3b_grpo "$@"
