#!/usr/bin/env bash
# GRPO on DeepScaleR with Qwen2.5-7B, one node of NPUs (8 of a 910B, 16 of an A3), vLLM (vllm-ascend). Not run on hardware yet.
# The hyper-parameters are those of MindSpeed RL's configs/grpo_qwen25_7b_A3.yaml. Not theirs: the scorer, the dual clip at 3
# (they have none), and sizes of memory and parallelism.
# Data: python -m rltrain.data_preprocess.deepscaler --output data/deepscaler
#       python -m rltrain.data_preprocess.math500 --output data/math500
# On GPUs: trainer.device=cuda. Where this is not one of the nodes: trainer.n_gpus_per_node=8
set -euo pipefail
DATA="${DATA:-data/deepscaler}"
VAL="${VAL:-data/math500/test.parquet}"
MODEL="${MODEL:-models/Qwen2.5-7B}"

exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$VAL" \
    data.train_batch_size=32 data.max_prompt_length=2048 data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_kl_loss=True \
    'actor_rollout_ref.actor.optim.betas=[0.9,0.95]' \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
    trainer.device=npu trainer.save_freq=200 trainer.test_freq=50 trainer.total_training_steps=1000 \
    trainer.project_name=math trainer.experiment_name=qwen2_5_7b_grpo "$@"
