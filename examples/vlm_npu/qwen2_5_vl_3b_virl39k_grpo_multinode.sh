#!/usr/bin/env bash
# GRPO on ViRL39K with Qwen2.5-VL-3B, 3 nodes of 16 NPUs, vLLM (vllm-ascend), long answers. Not run on hardware yet.
# On GPUs: trainer.device=cuda trainer.nnodes=6 trainer.n_gpus_per_node=8
# Data: python -m rltrain.data_preprocess.virl39k --input FOLDER --output data/virl39k    (images.zip unpacked)
#       python -m rltrain.data_preprocess.geometry3k --output data/geometry3k    (validation, as in the recipe)
# Nodes: bash scripts/ray_start.sh head on the first, worker on the others (docs/cluster.md), then this on the first.
# Every node reads the images: DATA, VAL and MODEL are on storage that all of them share.
set -euo pipefail
DATA="${DATA:-data/virl39k}"
VAL="${VAL:-data/geometry3k/test.parquet}"
MODEL="${MODEL:-models/Qwen2.5-VL-3B-Instruct}"

# 38,870 problems are 73 steps an epoch: each is tested and saved. 102,400 pixels are 320 x 320.
# One answer that runs to the limit holds a step up; actor_rollout_ref.rollout.tail=carry_over goes on with it later.
exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=5.0 \
    data.train_files="$DATA/train.parquet" data.val_files="$VAL" data.max_pixels=102400 \
    data.train_batch_size=528 data.max_prompt_length=2048 data.max_response_length=16384 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=528 \
    actor_rollout_ref.actor.clip_ratio_low=0.4 actor_rollout_ref.actor.clip_ratio_high=0.4 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    trainer.device=npu trainer.nnodes=3 trainer.n_gpus_per_node=16 ray_kwargs.ray_init.address=auto \
    trainer.save_freq=73 trainer.test_freq=73 trainer.total_epochs=5 \
    trainer.project_name=virl39k trainer.experiment_name=qwen2_5_vl_3b_grpo "$@"
