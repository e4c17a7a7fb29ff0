#!/usr/bin/env bash
# GRPO over several turns, on a plain CPU: a tiny model that knows how a call of a calculator is written learns to call it for
# sums that it cannot compute, and to say what it was told. Nothing is downloaded but Python packages; under four minutes on
# two CPU cores.
# Each call trains in a new folder. Extra key=value arguments are handed to rltrain.main_ppo, e.g.: trainer.total_training_steps=60
# Environment: TASK    calculator (default), or guess: an environment says "higher" or "lower" of a guessed number
#              SEED    of the model (default: 1)
#              WARM_UP steps of it (default: 300)
#              OUT     folder for everything (default: outputs/agent_cpu)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup_env.sh"
setup_env ""
cd "$REPO"

TASK="${TASK:-calculator}"
OUT="${OUT:-outputs/agent_cpu}"
DATA="$OUT/$TASK"
MODEL="$OUT/${TASK}_model_${SEED:-1}"
RUN="${RUN:-$OUT/run_${TASK}_$(date +%Y%m%d_%H%M%S)}"
TURNS=actor_rollout_ref.rollout.multi_turn

case "$TASK" in
calculator)
    say "data: sums of numbers up to 49"
    "$PYTHON" -m rltrain.data_preprocess.arithmetic --output "$DATA" --num-train 2048 --num-test 128 --max-operand 49 --seed 0 >/dev/null
    KEYS=("$TURNS.function_tool_path=rltrain.agents.ready.calculator" "$TURNS.max_assistant_turns=3"
        actor_rollout_ref.rollout.val_kwargs.n=4
        actor_rollout_ref.actor.optim.lr=2e-4 trainer.total_training_steps=40)
    ;;
guess)
    say "data: numbers from 1 to 15"
    "$PYTHON" -m rltrain.data_preprocess.guess_number --output "$DATA" --num-train 2048 --num-test 15 --low 1 --high 15 --prompt '{low}-{high}?' --seed 0 >/dev/null
    KEYS=("$TURNS.environment=rltrain.agents.ready.guess:Guess" "$TURNS.max_assistant_turns=4"
        actor_rollout_ref.rollout.val_kwargs.n=32
        actor_rollout_ref.actor.optim.lr=5e-4 trainer.total_training_steps=200)
    ;;
*)
    echo "error: TASK=$TASK: it is calculator or guess" >&2
    exit 2
    ;;
esac
if [ ! -e "$MODEL/config.json" ]; then
    say "model: a tiny one that can write, and does not know what for (about a minute)"
    "$PYTHON" scripts/make_small_agent.py --task "$TASK" --output "$MODEL" --seed "${SEED:-1}" --steps "${WARM_UP:-300}"
fi

say "training: GRPO into $RUN"
handing_on_signals "$PYTHON" -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    data.train_batch_size=32 data.max_prompt_length=32 data.max_response_length=40 \
    actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=1 \
    trainer.test_freq=10 trainer.save_freq=-1 trainer.val_before_train=True \
    trainer.logger='["console","tensorboard"]' trainer.project_name=agent_cpu trainer.experiment_name="$TASK" \
    trainer.default_local_dir="$RUN" "${KEYS[@]}" "$@"

say "an answer before and after"
"$PYTHON" -m rltrain.view "$RUN" --compare -n 1
say "done: 'python -m rltrain.view $RUN --worst' shows answers; 'tensorboard --logdir $RUN/tensorboard' the curves"
