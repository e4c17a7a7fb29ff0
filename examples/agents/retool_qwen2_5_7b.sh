#!/usr/bin/env bash
# ReTool with Qwen2.5-7B, 4 nodes of 8 GPUs, vLLM over four each: the policy calls a Python interpreter. Not run on hardware
# yet. The settings are those of verl's recipe (recipe/retool/run_qwen2_7b_dapo.sh), with answers of 20480 tokens as in its
# published run on 32 H20. Not theirs: the interpreter (a jail on each node in place of SandboxFusion; docs/security.md),
# and validation on AIME 2025 alone.
# MODEL is one that was fine-tuned on ReTool-SFT: Qwen2.5-7B-Instruct seldom calls the tool.
# Data: python -m rltrain.data_preprocess.retool --output data/retool
#       python -m rltrain.data_preprocess.retool --dataset aime25 --output data/retool_aime25
# Nodes: docs/cluster.md
set -euo pipefail
DATA="${DATA:-data/retool}"
VAL="${VAL:-data/retool_aime25/test.parquet}"
MODEL="${MODEL:-models/Qwen2.5-7B-Instruct-ReTool-SFT}"
FOLDER="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$VAL" \
    data.train_batch_size=64 data.max_prompt_length=2048 data.max_response_length=20480 data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.9 actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.multi_turn.function_tool_path="$FOLDER/retool_tools.py" \
    actor_rollout_ref.rollout.multi_turn.allow_code_execution=True \
    actor_rollout_ref.rollout.multi_turn.format=hermes actor_rollout_ref.rollout.multi_turn.max_assistant_turns=16 \
    actor_rollout_ref.rollout.val_kwargs.n=30 actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.6 \
    trainer.device=cuda trainer.nnodes="${NNODES:-4}" trainer.n_gpus_per_node=8 ray_kwargs.ray_init.address=auto \
    trainer.save_freq=20 trainer.test_freq=10 trainer.total_epochs=1 \
    trainer.project_name=retool trainer.experiment_name=qwen2_5_7b "$@"
