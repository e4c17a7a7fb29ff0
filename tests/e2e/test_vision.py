"""Runs of models with a vision tower, on text and on prompts with images."""

import importlib.util

import pytest

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from rltrain.main_ppo import main
from rltrain.run.report.table import read_metrics
from tests.e2e.test_train import largest_difference, stopped_after, weights
from tests.tiny import small_run
from tests.tiny_vision import save_tiny_vision_model, write_pictures

pytestmark = pytest.mark.usefixtures("joined")

R = "actor_rollout_ref__rollout__"
PICTURES = {"data__max_prompt_length": 48, "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 128}
TWO = {"trainer__n_gpus_per_node": 2, "trainer__test_freq": 1}
LORA = {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__actor__optim__lr": 0.01}
RUNS = {
    "grpo": ("qwen2_5_vl", {"algorithm__adv_estimator": "grpo"}),
    "pictures, a critic, two processes": ("qwen3_vl", PICTURES | TWO | {"algorithm__adv_estimator": "gae"}),
    "pictures, adapters": ("qwen2_5_vl", PICTURES | LORA),
    "vllm": ("qwen2_5_vl", {R + "name": "vllm", R + "engine_kwargs__vllm__block_size": 32}),
}
# Other tests run in every suite: tests/models/test_vision_text.py and tests/trainer/test_vision_steps.py test text and
# adapters, tests/workers/test_engine_images.py vLLM, tests/trainer/test_resume.py resuming.
ALWAYS = "pictures, a critic, two processes"
# vLLM starts in half a minute, and a checkpoint does not depend on the engine.
RESUMED = [name for name in RUNS if name not in ("vllm", ALWAYS)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == ALWAYS else pytest.mark.long) for name in RUNS]
)
def test_a_model_with_a_vision_tower_learns(name, arithmetic_files, tmp_path):
    family, changes = RUNS[name]
    sees, files = changes.items() >= PICTURES.items(), arithmetic_files
    if sees:
        files = write_pictures(tmp_path / "train.parquet", range(24)), write_pictures(tmp_path / "t.parquet", range(6))
    model = save_tiny_vision_model(tmp_path / "model", family, tied=family == "qwen3_vl")

    def run(folder: str, **more) -> None:
        keys = {"trainer__save_freq": 1, **changes, **more}
        assert main(small_run(model, files, tmp_path / folder, **keys)) == 0

    run("straight")
    for line in read_metrics(tmp_path / "straight"):
        assert line["rollout/log_prob_gap/mean"] < 1e-4
        assert line["actor/grad_norm"] > 0
        # For 16 samples. Neither pixels nor tokens pass through the driver.
        assert (line.get("perf/image_gb", 0) * 2**30 / 16 > 10_000) == sees
        assert line["perf/driver_bytes_per_sample"] < 2000
    start, first, second = load_file(model / "model.safetensors"), *(weights(tmp_path / "straight", k) for k in (1, 2))
    moved = {key for key in start if not (start[key] == first[key]).all()}
    assert moved
    assert any("visual" in key for key in moved) == (sees and not changes.items() >= LORA.items())
    folder = tmp_path / "straight" / "global_step_2" / "huggingface"
    _, told = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values())  # keys that are missing, unexpected or of another shape
    AutoProcessor.from_pretrained(folder)
    if name in RESUMED:
        (tmp_path / "resumed").mkdir()
        stopped_after(1, tmp_path / "straight", tmp_path / "resumed")
        run("resumed")
        assert largest_difference(second, weights(tmp_path / "resumed", 2)) == 0
        assert largest_difference(second, first) > 0
