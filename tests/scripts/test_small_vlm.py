"""The small vision-language models of examples/vlm_cpu.sh, and the command that trains them."""

import importlib.util

import pytest

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from transformers import AutoModelForImageTextToText

from rltrain.config.schema.families import FAMILIES as ROWS
from rltrain.data.chat import ChatEncoder
from rltrain.data_preprocess import rectangles
from tests.scripts.example import ROOT, accept_commands, run_example

FAMILIES = [name for name, family in ROWS.items() if family.images]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_small_vlm", ROOT / "scripts/make_small_vlm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_family_that_can_be_trained_has_one(script):
    assert set(script.FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_model_sees_every_square_as_one_token(script, family, tmp_path):
    assert script.main(["--family", family, "--output", str(tmp_path), "--seed", "3"]) == 0
    row = rectangles.generate(1, 0, seed=0)["train"][0]
    asked = ChatEncoder(str(tmp_path)).encode_prompt(row["prompt"], row["images"])
    assert asked.images.num_tokens.tolist() == [rectangles.NUM_SQUARES**2]
    assert len(asked.tokens) <= 32
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6


def test_the_commands_of_the_example_are_accepted(script, tmp_path, capsys):
    process = run_example(tmp_path, "vlm_cpu.sh", FAMILY="qwen3_vl", BLANK=1)
    assert (process.returncode, process.stderr) == (0, "")
    accept_commands(tmp_path, rectangles, script, "make_small_vlm", capsys)
