#!/usr/bin/env bash
# From a fresh clone to a model that GRPO has taught to add: environment, data, a small model, training, report. Nothing is
# downloaded but Python packages; four to eight minutes on two CPU cores.
# Each call trains in a new folder under outputs/quickstart (the data and the small model are made once). Extra key=value
# arguments are handed to rltrain.main_ppo, e.g.: bash scripts/quickstart.sh trainer.total_training_steps=200
# Environment: OUT  folder for everything (default: outputs/quickstart)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env ""
cd "$REPO"

OUT="${OUT:-outputs/quickstart}"
RUN="$OUT/run_$(date +%Y%m%d_%H%M%S)"
MODEL="$OUT/model"

say "data: sums of numbers up to 49"
"$PYTHON" -m rltrain.data_preprocess.arithmetic --output "$OUT/data" --num-train 2048 --num-test 128 --max-operand 49 --seed 0 >/dev/null
if [ ! -e "$MODEL/config.json" ]; then
    say "model: making a small one that is right now and then (about a minute)"
    "$PYTHON" scripts/make_small_model.py --output "$MODEL" --train "$OUT/data/train.parquet" --seed 1
fi

say "training: GRPO, 32 prompts x 8 answers a step, into $RUN"
handing_on_signals "$PYTHON" -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$OUT/data/train.parquet" data.val_files="$OUT/data/test.parquet" \
    data.train_batch_size=32 data.max_prompt_length=32 data.max_response_length=8 \
    actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.optim.lr=1e-4 actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.optim.weight_decay=0.0 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=1 \
    trainer.total_training_steps=80 trainer.test_freq=40 trainer.save_freq=-1 trainer.val_before_train=True \
    trainer.logger='["console","tensorboard"]' trainer.project_name=quickstart trainer.experiment_name=arithmetic \
    trainer.default_local_dir="$RUN" "$@"

say "three responses before and after"
"$PYTHON" -m rltrain.view "$RUN" --compare -n 3
say "done. What next (type 'source .venv/bin/activate' first):"
cat <<TXT
  the page     $RUN/report.html
  the answers  python -m rltrain.view $RUN --worst
  the curves   tensorboard --logdir $RUN/tensorboard
  your data    python -m rltrain.data_preprocess.jsonl --help        docs/data.md
  your reward  python -m rltrain.rewards.try reward.py $OUT/data/train.parquet        docs/rewards.md
  your model   python -m rltrain.main_ppo … actor_rollout_ref.model.path=FOLDER --dry-run        README.md, "Train"
TXT
