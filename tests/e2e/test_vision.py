"""Runs on texts of models with a vision tower."""

import importlib.util

import pytest

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from rltrain.main_ppo import main
from rltrain.report import read_metrics
from tests.e2e.test_train import largest_difference, stopped_after, weights
from tests.tiny import small_run
from tests.tiny_vision import save_tiny_vision_model

pytestmark = pytest.mark.usefixtures("joined")

R = "actor_rollout_ref__rollout__"
RUNS = {
    "grpo": ("qwen2_5_vl", {"algorithm__adv_estimator": "grpo"}),
    "a critic, two processes": ("qwen3_vl", {"algorithm__adv_estimator": "gae", "trainer__n_gpus_per_node": 2}),
    "adapters": ("qwen3_vl", {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__actor__optim__lr": 0.01}),
    "vllm": ("qwen2_5_vl", {R + "name": "vllm", R + "engine_kwargs__vllm__block_size": 32}),
}
# vLLM starts in half a minute, and a checkpoint does not depend on the engine.
RESUMED = [name for name in RUNS if name != "vllm"]


@pytest.mark.parametrize("name", RUNS)
def test_a_model_with_a_vision_tower_learns_from_texts(name, arithmetic_files, tmp_path):
    family, changes = RUNS[name]
    model = save_tiny_vision_model(tmp_path / "model", family, tied=family == "qwen3_vl")

    def run(folder: str, **more) -> None:
        keys = {"trainer__save_freq": 1, **changes, **more}
        assert main(small_run(model, arithmetic_files, tmp_path / folder, **keys)) == 0

    run("straight")
    for line in read_metrics(tmp_path / "straight"):
        assert line["rollout/log_prob_gap/mean"] < 1e-4
        assert line["actor/grad_norm"] > 0
    start, first, second = load_file(model / "model.safetensors"), *(weights(tmp_path / "straight", k) for k in (1, 2))
    moved = {key for key in start if not (start[key] == first[key]).all()}
    assert moved
    assert not any("visual" in key for key in moved)
    folder = tmp_path / "straight" / "global_step_2" / "huggingface"
    AutoModelForImageTextToText.from_pretrained(folder)
    AutoProcessor.from_pretrained(folder)
    if name in RESUMED:
        (tmp_path / "resumed").mkdir()
        stopped_after(1, tmp_path / "straight", tmp_path / "resumed")
        run("resumed")
        assert largest_difference(second, weights(tmp_path / "resumed", 2)) == 0
        assert largest_difference(second, first) > 0
