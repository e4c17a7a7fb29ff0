#!/usr/bin/env bash
# ReTool with Qwen2.5-7B, one node of 8 910B, vLLM (vllm-ascend) over two each. Not run on hardware yet. The settings are
# those of verl's guide for Ascend (Qwen2.5-7B, ReTool); what differs from retool_qwen2_5_7b.sh stands below. Not theirs: the
# interpreter.
set -euo pipefail
FOLDER="$(dirname "${BASH_SOURCE[0]}")"
export NNODES=1
exec bash "$FOLDER/retool_qwen2_5_7b.sh" \
    data.train_batch_size=32 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.max_num_seqs=1024 actor_rollout_ref.rollout.max_num_batched_tokens=22528 \
    trainer.device=npu ray_kwargs.ray_init.address=null trainer.val_before_train=False \
    trainer.save_freq=100 trainer.test_freq=20 trainer.experiment_name=qwen2_5_7b_npu "$@"
