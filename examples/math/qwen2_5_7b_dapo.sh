#!/usr/bin/env bash
# DAPO (clip-higher, dynamic sampling, overlong penalty, token-mean) with Qwen2.5-7B-Instruct, one node of NPUs (8 of a 910B,
# 16 of an A3), vLLM (vllm-ascend). Not run on hardware yet. The hyper-parameters are those of verl's script for NPUs
# (recipe/dapo/run_dapo_qwen2.5_7b_npu.sh). Not theirs: mini-batches of 16 prompts (theirs: 1), 500 steps (theirs: an epoch),
# and sizes of memory.
# Data: python -m rltrain.data_preprocess.dapo_math_17k --output data/dapo_math_17k
#       python -m rltrain.data_preprocess.aime --output data/aime24
# On GPUs: trainer.device=cuda. Where this is not one of the nodes: trainer.n_gpus_per_node=8
set -euo pipefail
DATA="${DATA:-data/dapo_math_17k}"
VAL="${VAL:-data/aime24/test.parquet}"
MODEL="${MODEL:-models/Qwen2.5-7B-Instruct}"

exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 \
    data.train_files="$DATA/train.parquet" data.val_files="$VAL" \
    data.gen_batch_size=48 data.train_batch_size=16 data.max_prompt_length=2048 data.max_response_length=20480 \
    data.filter_overlong_prompts=True \
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=4096 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    trainer.device=npu trainer.save_freq=20 trainer.test_freq=5 trainer.total_training_steps=500 \
    trainer.project_name=math trainer.experiment_name=qwen2_5_7b_dapo "$@"
