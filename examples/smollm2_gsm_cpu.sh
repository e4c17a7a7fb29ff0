#!/usr/bin/env bash
# GRPO on a real pretrained chat model on a plain CPU: SmolLM2-135M-Instruct, word problems in GSM8K's form, two worker processes.
# Runs two steps, stops, and runs the same command for two more: the second call continues from the checkpoint.
# Needs about 10 GiB of memory. Extra key=value arguments are handed on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup_env.sh"
setup_env smollm2
cd "$REPO"

MODEL="$("$PYTHON" scripts/convert_smollm2.py | tail -n 1)"
DATA=outputs/smollm2_gsm/data
RUN="${RUN:-outputs/smollm2_gsm/run_$(date +%Y%m%d_%H%M%S)}"
# Word problems, and small sums in the same form: a model of this size is seldom right about the former.
"$PYTHON" -m rltrain.data_preprocess.reasoning_gym --task gsm_symbolic --as-gsm8k --worked-example \
    --num-train 128 --num-test 8 --output "$DATA/words" >/dev/null
"$PYTHON" -m rltrain.data_preprocess.reasoning_gym --task chain_sum --as-gsm8k --worked-example \
    --settings min_terms=2 max_terms=2 min_digits=1 max_digits=1 --num-train 128 --num-test 8 --output "$DATA/sums" >/dev/null

train() {
    handing_on_signals "$PYTHON" -m rltrain.main_ppo \
        algorithm.adv_estimator=grpo \
        data.train_files="['$DATA/words/train.parquet','$DATA/sums/train.parquet']" data.val_files="$DATA/sums/test.parquet" \
        data.train_batch_size=8 data.max_prompt_length=320 data.max_response_length=96 data.filter_overlong_prompts=True \
        actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.model.enable_gradient_checkpointing=False \
        actor_rollout_ref.actor.optim.lr=1e-5 actor_rollout_ref.actor.ppo_mini_batch_size=8 \
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024 actor_rollout_ref.actor.fsdp_config.compute_dtype=bfloat16 \
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
        actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.temperature=0.7 actor_rollout_ref.rollout.dtype=bfloat16 \
        trainer.device=cpu trainer.n_gpus_per_node=2 trainer.logger='["console","tensorboard"]' \
        trainer.val_before_train=False trainer.save_freq=2 \
        trainer.project_name=smollm2 trainer.experiment_name=gsm trainer.default_local_dir="$RUN" "$@"
}

say "training: steps 1 and 2"
train trainer.total_training_steps=2 "$@"
say "training: the same command, two more steps"
train trainer.total_training_steps=4 "$@"
say "done: tensorboard --logdir $RUN/tensorboard"
