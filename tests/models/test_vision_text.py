"""Models with a vision tower that are trained on text: the results equal transformers', and exports are complete."""

import importlib.util
from dataclasses import replace

import pytest
import torch

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from transformers import AutoModelForImageTextToText

from rltrain.common.columns.batch import Batch
from rltrain.common.device import get_device
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel
from rltrain.models.load import load_config, split_by_owner
from rltrain.models.weights.lora import Lora, lora_layers
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from tests.batches import batch_of_rows
from tests.distance import distance
from tests.models.test_forward import TEMPERATURE, by_transformers, gradients_of
from tests.tiny_vision import FAMILIES, TOKENS, save_tiny_families

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
LORA = Lora("actor_rollout_ref.model", 2, 4.0, "all-linear", None, None, torch.float32, 1)
# (prompt, answers): two share a prompt, one answer is empty.
GROUPS = [(5, [7, 3]), (4, [0]), (9, [6])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_tiny_families(tmp_path_factory)


@pytest.fixture(params=FAMILIES)
def folder(request, folders) -> str:
    return folders[request.param]


def make(folder: str, kind=PolicyModel, **changes):
    return sharded_model(kind, ModelSpec(folder, gradient_checkpointing=True, **changes), get_device("cpu"))


def plain(folder: str):
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def texts() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows, prompts = [], []
    for length, answers in GROUPS:
        prompt = torch.randint(6, len(TOKENS), (length,), generator=generator, dtype=torch.int32)
        for answer in answers:
            new = torch.randint(6, len(TOKENS), (answer,), generator=generator, dtype=torch.int32)
            rows.append(torch.cat([prompt, new]))
            prompts.append(length)
    return batch_of_rows(rows, prompts)


def test_log_probs_and_gradients_equal_transformers(folder):
    policy, reference, batch = make(folder).train(), plain(folder), texts()
    log_probs, expected = policy(pack(batch, CPU), TEMPERATURE).log_probs, by_transformers(reference, batch)[0]
    assert distance(log_probs, expected) < 5e-6
    log_probs.sum().backward()
    expected.sum().backward()
    theirs = {name: each.grad for name, each in reference.named_parameters() if each.grad is not None}
    assert distance(gradients_of(policy), theirs) < 1e-5


def test_adapters_go_to_the_language_model(folders):
    """This includes names that layers of the tower share; the tower's own names select its layers."""
    for family in FAMILIES:
        layers = [name for name, _ in lora_layers(make(folders[family], lora=LORA))]
        # A gated delta net has 5 linear layers, attention 4; GLM-4.1V has one layer for gate and up.
        assert len(layers) == {"qwen3_5": 5 + 4 + 2 * 3, "glm4v": 2 * 6}.get(family, 2 * 7)
        assert all("language_model.layers" in name for name in layers)
    some = make(folders["internvl"], lora=replace(LORA, target_modules=["q_proj"], exclude_modules=".*vision.*"))
    assert sum(1 for _ in lora_layers(some)) == 2
    tower_only = make(folders["internvl"], lora=replace(LORA, target_modules=r".*vision_tower.*q_proj"))
    assert all("vision_tower" in name for name, _ in lora_layers(tower_only))


def test_a_change_of_the_config_reaches_the_decoder(folders):
    override = {"max_position_embeddings": 99, "tie_word_embeddings": True}
    config = load_config(folders["qwen3_vl"], override=override)
    assert config.get_text_config().max_position_embeddings == 99
    nested = {"tie_word_embeddings": True, "text_config": {"max_position_embeddings": 99}}
    assert split_by_owner(config, override) == nested
