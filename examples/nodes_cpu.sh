#!/usr/bin/env bash
# A rehearsal for several nodes, on their CPUs: two steps of GRPO on sums, and a checkpoint in a folder that all share. What
# lies between the nodes (addresses, token, storage, code) is what accelerators will meet. Same line on every node, other RANK:
#   RANK=0 NNODES=2 bash scripts/ray_start.sh -- bash examples/nodes_cpu.sh
# Extra key=value arguments are handed to rltrain.main_ppo: trainer.nnodes=2 in a cluster that runs already.
# Environment: OUT     folder for everything, on shared storage (default: outputs/nodes_cpu)
set -euo pipefail
OUT="${OUT:-outputs/nodes_cpu}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

python -m rltrain.data_preprocess.arithmetic --output "$OUT/data" --num-train 64 --num-test 8 >/dev/null
[ -e "$OUT/model/config.json" ] || python "$ROOT/scripts/make_small_model.py" --output "$OUT/model" >/dev/null

# Random answers are all wrong, and teach nothing; the bonus for entropy makes a gradient.
exec python -m rltrain.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$OUT/data/train.parquet" \
    data.train_batch_size=16 data.max_prompt_length=32 data.max_response_length=4 \
    actor_rollout_ref.model.path="$OUT/model" actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.entropy_coeff=0.01 \
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=2 \
    trainer.device=cpu ray_kwargs.ray_init.address=auto \
    trainer.total_training_steps=2 trainer.default_local_dir="$OUT/run_$(date +%Y%m%d_%H%M%S)" "$@"
