#!/usr/bin/env bash
# GRPO on boba mathematics with DeepSeek-R1-Distill-Qwen-7B, 8 nodes of 8 GPUs, SGLang over two each: the settings of
# verl's published run, of which those that are our defaults too are left out. Not run on hardware yet.
# Data: python -m rltrain.data_preprocess.boba --output data/boba
# Nodes: docs/cluster.md. With vLLM: actor_rollout_ref.rollout.name=vllm
set -euo pipefail
DATA="${DATA:-data/boba}"
MODEL="${MODEL:-models/DeepSeek-R1-Distill-Qwen-7B}"

exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.train_batch_size=128 data.max_prompt_length=1024 data.max_response_length=27648 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30000 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.temperature=0.6 \
    trainer.device=cuda trainer.nnodes=8 trainer.n_gpus_per_node=8 ray_kwargs.ray_init.address=auto \
    trainer.save_freq=50 trainer.total_epochs=15000 \
    trainer.project_name=boba trainer.experiment_name=ds_7b "$@"
