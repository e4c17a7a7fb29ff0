#!/usr/bin/env bash
# GRPO on Geometry3K with Qwen3-VL-2B: the recipe of Qwen2.5-VL-3B with another model. Not run on hardware yet.
set -euo pipefail
export MODEL="${MODEL:-models/Qwen3-VL-2B-Instruct}"
FOLDER="$(dirname "${BASH_SOURCE[0]}")"
exec bash "$FOLDER/qwen2_5_vl_3b_geometry3k_grpo.sh" trainer.experiment_name=qwen3_vl_2b_grpo "$@"
