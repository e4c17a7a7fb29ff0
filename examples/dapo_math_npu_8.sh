#!/usr/bin/env bash
# DAPO: clip-higher, dynamic sampling, overlong penalty, token-mean; one node of 8 NPUs. Not run on hardware yet.
set -euo pipefail
DATA="${DATA:-data/dapo_math_17k}"
MODEL="${MODEL:-models/Qwen2.5-Math-7B}"

exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 data.gen_batch_size=384 \
    data.train_files="$DATA/train.parquet" data.train_batch_size=128 data.max_prompt_length=2048 data.max_response_length=8192 \
    data.filter_overlong_prompts=True \
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=2048 \
    actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.model.override_config.max_position_embeddings=32768 \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=16 \
    trainer.device=npu trainer.n_gpus_per_node=8 trainer.save_freq=10 trainer.total_training_steps=500 \
    trainer.project_name=dapo trainer.experiment_name=qwen2_5_math_7b_npu "$@"
