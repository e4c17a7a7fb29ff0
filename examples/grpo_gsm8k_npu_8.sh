#!/usr/bin/env bash
# GRPO on GSM8K, one node of 8 NPUs, vLLM (vllm-ascend) as rollout engine. Not run on hardware yet.
# Data: python -m rltrain.data_preprocess.gsm8k --input FOLDER --output data/gsm8k
set -euo pipefail
DATA="${DATA:-data/gsm8k}"
MODEL="${MODEL:-models/Qwen2.5-0.5B-Instruct}"

exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=512 data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    trainer.device=npu trainer.n_gpus_per_node=8 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 \
    trainer.project_name=gsm8k trainer.experiment_name=qwen2_5_0_5b_npu "$@"
