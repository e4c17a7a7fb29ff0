#!/usr/bin/env bash
# ReTool with Qwen2.5-32B, 4 nodes of 8 GPUs. Not run on hardware yet. The settings are those of verl's recipe
# (recipe/retool/run_qwen2.5_32b_dapo.sh); what differs from retool_qwen2_5_7b.sh stands below. Not theirs: the interpreter.
set -euo pipefail
export MODEL="${MODEL:-models/Qwen2.5-32B-Instruct-ReTool-SFT}"
FOLDER="$(dirname "${BASH_SOURCE[0]}")"
exec bash "$FOLDER/retool_qwen2_5_7b.sh" \
    data.train_batch_size=512 data.max_response_length=16384 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8 actor_rollout_ref.rollout.val_kwargs.n=1 \
    trainer.save_freq=30 trainer.test_freq=5 trainer.experiment_name=qwen2_5_32b "$@"
