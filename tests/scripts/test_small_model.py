"""The quickstart's model, without warm-up and for a few steps."""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rltrain.data_preprocess import arithmetic

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_small_model", ROOT / "scripts/make_small_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    asked = f"--num-train 64 --num-test 4 --max-operand 49 --output {folder}/data"
    assert arithmetic.main(asked.split()) == 0
    options = f"--train {folder}/data/train.parquet --output {folder}/model --steps 10 --batch-size 16"
    assert script.main(options.split()) == 0
    return folder / "model"


def test_transformers_loads_a_model_of_a_few_million_weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 2e6 < sum(parameter.numel() for parameter in model.parameters()) < 5e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert json.loads((folder / "warm_up.json").read_text())["step"] == 10
