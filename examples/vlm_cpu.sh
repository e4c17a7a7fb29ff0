#!/usr/bin/env bash
# GRPO on images, on a plain CPU: a vision-language model with random weights learns to tell the area of a rectangle on
# squared paper, which stands in the image alone. Nothing is downloaded but Python packages; about two minutes on two CPU cores,
# and at the first call what the environment takes (torchvision).
# Each call trains in a new folder. Extra key=value arguments are handed to rltrain.main_ppo, e.g.: trainer.total_training_steps=50
# Environment: FAMILY  qwen2_5_vl (default), qwen3_vl, qwen2_vl, qwen3_5, glm4v or internvl
#              SEED    of the random weights (default: 1)
#              TASK    rectangles (default), or moving_square: videos, for qwen2_vl, qwen2_5_vl, qwen3_vl and qwen3_5
#              BLANK   1: the same with white images, from which nothing can be learnt: right once in six times at best;
#                      moving_square: with shuffled frames: right once in two times at best
#              OUT     folder for everything (default: outputs/vlm_cpu)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup_env.sh"
setup_env images
cd "$REPO"

FAMILY="${FAMILY:-qwen2_5_vl}"
TASK="${TASK:-rectangles}"
OUT="${OUT:-outputs/vlm_cpu}"
DATA="$OUT/data${BLANK:+_blank}"
CONTROL=--blank
LONGEST=32
if [ "$TASK" = moving_square ]; then
    DATA="$OUT/videos${BLANK:+_blank}"
    CONTROL=--shuffled
    LONGEST=96
fi
MODEL="$OUT/$FAMILY"
RUN="${RUN:-$OUT/run_${FAMILY}${BLANK:+_blank}_$(date +%Y%m%d_%H%M%S)}"

say "data: $TASK"
"$PYTHON" -m "rltrain.data_preprocess.$TASK" --output "$DATA" --num-train 2048 --num-test 128 --seed 0 ${BLANK:+$CONTROL} >/dev/null
[ -e "$MODEL/config.json" ] || "$PYTHON" scripts/make_small_vlm.py --family "$FAMILY" --output "$MODEL" --seed "${SEED:-1}"

say "training: GRPO, 32 images x 8 answers a step, into $RUN"
# The bonus for entropy keeps a random model from giving one and the same answer to every image.
handing_on_signals "$PYTHON" -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" data.image_key=images \
    data.train_batch_size=32 data.max_prompt_length="$LONGEST" data.max_response_length=2 \
    actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.optim.lr=5e-4 actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.entropy_coeff=0.03 \
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=1 \
    trainer.total_training_steps=150 trainer.test_freq=10 trainer.save_freq=-1 trainer.val_before_train=True \
    trainer.logger='["console","tensorboard"]' trainer.project_name=vlm_cpu trainer.experiment_name="$FAMILY${BLANK:+_blank}" \
    trainer.default_local_dir="$RUN" "$@"

say "done: 'python -m rltrain.view $RUN --worst' shows answers; 'tensorboard --logdir $RUN/tensorboard' the curves"
