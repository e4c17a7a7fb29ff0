"""``rltrain resolution`` with Ray: from the command line to the resulting keys."""

import importlib.util
import json

import pytest

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from rltrain.data_preprocess import rectangles
from rltrain.tools.resolution.__main__ import main
from tests.tiny_vision import save_tiny_vision_model


def found(folder):
    return json.loads((folder / "resolution.json").read_text(encoding="utf-8"))


@pytest.mark.long  # starts an engine five times
@pytest.mark.usefixtures("joined")
def test_a_search_chooses_bounds_scores_them_on_other_rows_and_keeps_results(tmp_path, capfd):
    rectangles.main(["--output", str(tmp_path / "data"), "--num-train", "24", "--num-test", "20"])
    model, out = save_tiny_vision_model(tmp_path / "model", "qwen2_5_vl", tied=False), tmp_path / "out"
    words = [f"model={model}", f"dev={tmp_path}/data/train.parquet", f"test={tmp_path}/data/test.parquet"]
    words += [f"out={out}", "max_pixels=1764", "data.max_prompt_length=64", "data.max_response_length=2"]
    words += ["trainer.device=cpu", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=hf"]
    assert main(words) == 0
    told = capfd.readouterr().out
    result = found(out)
    assert [(part["image_tokens"], part["prompts"]) for part in result["settings"]] == [(9, 24), (1, 24)]
    # With random weights both are equally bad, so the cheaper one is chosen.
    assert result["chosen"]["words"] == "data.min_pixels=null data.max_pixels=1764"
    assert "words: data.min_pixels=null data.max_pixels=1764" in told
    assert "no difference is shown" in told
    assert {part["sources"]["rltrain/rectangles"]["prompts"] for part in result["tests"].values()} == {20}
    assert main(words) == 0
    assert "min_none_max_none (default): was evaluated before" in capfd.readouterr().out
    assert found(out) == result
