#!/usr/bin/env bash
# GRPO on boba mathematics with DeepSeek-R1-Distill-Qwen-1.5B, one node of 8 H100: the sizes that verl and RLinf publish for
# it (Ulysses 2, so 4 ranks of 128 samples a step; 28,672 tokens). Not run on hardware yet.
# Data: python -m rltrain.data_preprocess.boba --output data/boba
# The tables do not say how many answers a prompt has, nor the updates of a step: 16 and 4 are RLinf's, the rest is that of
# the 7B recipe.
set -euo pipefail
DATA="${DATA:-data/boba}"
MODEL="${MODEL:-models/DeepSeek-R1-Distill-Qwen-1.5B}"

exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.train_batch_size=32 data.max_prompt_length=1024 data.max_response_length=27648 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30000 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.temperature=0.6 \
    trainer.device=cuda trainer.n_gpus_per_node=8 trainer.save_freq=50 trainer.total_epochs=15000 \
    trainer.project_name=boba trainer.experiment_name=ds_1_5b "$@"
