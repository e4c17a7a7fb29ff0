#!/usr/bin/env bash
# Search-R1 with Qwen2.5-3B-Instruct, one node of 8 GPUs, vLLM: the policy searches a corpus. Not run on hardware yet. The
# settings are those of verl's example (examples/sglang_multiturn/search_r1_like/run_qwen2.5-3b_instruct_search_multiturn.sh),
# and steps, answers to a prompt and passages those of Search-R1's own train_grpo.sh. Not theirs: words are compared (BM25)
# and no embeddings, on each node and not by a server; up to 4 turns as in the paper; 1600 characters of a result.
# Data: python -m rltrain.data_preprocess.search_r1 --output data/search_r1
# Corpus: Search-R1's wiki-18.jsonl.gz; its index is built once, before the run (twice the size of the texts):
#       python -m rltrain.agents.ready.search data/wiki-18.jsonl.gz
set -euo pipefail
DATA="${DATA:-data/search_r1}"
VAL="${VAL:-$DATA/test.parquet}"
CORPUS="${CORPUS:-$PWD/data/wiki-18.jsonl.gz}"
MODEL="${MODEL:-models/Qwen2.5-3B-Instruct}"

exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$VAL" \
    data.train_batch_size=512 data.max_prompt_length=4096 data.max_response_length=3000 data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.multi_turn.environment=rltrain.agents.ready.search:Search \
    actor_rollout_ref.rollout.multi_turn.environment_kwargs.corpus="$CORPUS" \
    actor_rollout_ref.rollout.multi_turn.environment_kwargs.topk=3 \
    actor_rollout_ref.rollout.multi_turn.format=hermes actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4 \
    actor_rollout_ref.rollout.multi_turn.max_tool_response_length=1600 \
    trainer.device=cuda trainer.n_gpus_per_node=8 trainer.save_freq=100 trainer.test_freq=50 \
    trainer.total_training_steps=1005 trainer.total_epochs=15 \
    trainer.project_name=search_r1 trainer.experiment_name=qwen2_5_3b "$@"
