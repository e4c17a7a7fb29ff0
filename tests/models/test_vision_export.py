"""The export of a model that was trained on images, and the parts of its checkpoint that another run loads."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from transformers import AutoModelForImageTextToText, AutoProcessor

from rltrain.common.errors import CheckpointError
from rltrain.data.chat import ChatEncoder
from rltrain.models.attention.packing import pack
from rltrain.models.load import load_config
from rltrain.models.vision import tower
from rltrain.models.weights.state import load_training_state, save_training_state
from tests.distance import distance
from tests.exported import export_huggingface, save_adapter
from tests.models.test_vision_packed import CPU, LORA, TEMPERATURE, batch_of, loss_of, make, make_batch
from tests.tiny_vision import FAMILIES, WITH_EXPERTS, picture, save_tiny_families

pytestmark = pytest.mark.usefixtures("process_group")

MODES = {"trained": {}, "frozen": {"tower": "frozen"}, "adapters": {"lora": LORA}}
ANSWERS = [*range(6, 20)]
QUESTION = [{"role": "user", "content": "1+<image>2<image>=?"}]
# The same in parts; None is an image.
QUESTION_PARTS = [text and {"type": "text", "text": text} for text in ("1+", None, "2", None, "=?")]
PICTURES = [picture(60, 30), picture(84, 56, seed=1)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_tiny_families(tmp_path_factory)


@pytest.fixture(params=[*FAMILIES, *WITH_EXPERTS])
def folder(request, folders) -> str:
    return folders[request.param]


def learn(policy, folder: str, step: float = 0.02) -> torch.optim.AdamW:
    """Make an optimizer step that changes every trained weight."""
    optimizer = torch.optim.AdamW([parameter for parameter in policy.parameters() if parameter.requires_grad], lr=step)
    for _ in range(2):  # the first moves of LoRA only B
        loss_of(*policy(pack(make_batch(folder), CPU), TEMPERATURE, True)[:2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(policy) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor().detach().clone() for name, each in policy.named_parameters()}


def tower_names(policy) -> set[str]:
    inside = {id(parameter) for part in tower(policy.model) for parameter in part.parameters()}
    return {name for name, each in policy.named_parameters() if id(each) in inside}


def export(policy, folder: str, out: Path) -> list[str]:
    return export_huggingface(policy, load_config(folder), ChatEncoder(folder), str(out), "tags: []\n---\n")


def served(folder: str) -> torch.Tensor:
    """Return the log-probs [tokens, vocabulary] of QUESTION as a user of transformers computes them, without
    our code."""
    model, processor = AutoModelForImageTextToText.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    content = [part or {"type": "image"} for part in QUESTION_PARTS]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=PICTURES, return_tensors="pt")
    with torch.no_grad():
        return torch.log_softmax(model(**inputs).logits[0].float(), -1)


def trained(policy, encoder: ChatEncoder) -> torch.Tensor:
    """Return the log-prob of each single ANSWER token after QUESTION, by the packed forward."""
    asked = encoder.encode_prompt(QUESTION, PICTURES)
    batch = batch_of([asked], torch.zeros(len(ANSWERS), dtype=torch.long), [[token] for token in ANSWERS])
    with torch.no_grad():
        return policy.eval()(pack(batch, CPU), 1.0).log_probs


@pytest.mark.few(5)
@pytest.mark.parametrize("mode", MODES)
def test_an_export_says_of_images_what_was_trained(folder, mode, tmp_path):
    policy, out = make(folder, **MODES[mode]), tmp_path / "out"
    start, names = whole(policy), tower_names(policy)
    learn(policy, folder)
    moved = {name for name, values in whole(policy).items() if not torch.equal(values, start[name])}
    assert moved
    assert bool(moved & names) == (mode == "trained")
    assert export(policy, folder, out) == []
    expected = trained(policy, ChatEncoder(folder))
    assert distance(served(str(out))[-1, ANSWERS], expected) < 1e-5
    assert distance(served(folder)[-1, ANSWERS], expected) > 1e-3
    assert "pipeline_tag: image-text-to-text\ntags" in (out / "README.md").read_text()
    one, other = (AutoProcessor.from_pretrained(path).to_json_string() for path in (folder, out))
    assert one == other


def test_peft_reads_the_adapters_as_they_were_trained(folder, tmp_path):
    from peft import PeftModel

    policy = make(folder, lora=LORA)
    learn(policy, folder)
    save_adapter(policy.model, folder, str(tmp_path))
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    merged = PeftModel.from_pretrained(plain, str(tmp_path)).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoProcessor.from_pretrained(folder).save_pretrained(tmp_path / "merged")
    expected = trained(policy, ChatEncoder(folder))
    assert distance(served(str(tmp_path / "merged"))[-1, ANSWERS], expected) < 1e-5
    again = make(folder, lora=replace(LORA, rank=0, path=str(tmp_path)))
    assert torch.equal(trained(again, ChatEncoder(folder)), expected)


def as_on_the_hub(folder: str, out: Path, family: str) -> str:
    """Save the folder in the hub's form: the bounds have older names, in a file of the image processor only."""
    shutil.copytree(folder, out)
    content = json.loads((out / "processor_config.json").read_text())
    part = content.pop("image_processor")
    if family in ("qwen2_vl", "qwen2_5_vl"):
        size = part.pop("size")
        part |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    (out / "preprocessor_config.json").write_text(json.dumps(part))
    (out / "processor_config.json").unlink()
    return str(out)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_bounds_of_pixels_are_those_of_the_training(family, folders, tmp_path):
    source = as_on_the_hub(folders[family], tmp_path / "source", family)
    # The second is wider than the processor's own bounds, which then hold.
    for number, bounds in enumerate([{"min_pixels": 3000, "max_pixels": 6000}, {"min_pixels": 1, "max_pixels": 10**9}]):
        out, encoder = tmp_path / str(number), ChatEncoder(source, **bounds)
        assert export_huggingface(make(source), load_config(source), encoder, str(out)) == []
        for width, height in [(20, 20), (60, 60), (300, 200)]:
            image = picture(width, height)
            found, expected = (
                each.encode_prompt([{"role": "user", "content": "<image>"}], [image])
                for each in (ChatEncoder(str(out)), encoder)
            )
            assert found.images.grids.tolist() == expected.images.grids.tolist()
            # PIL and torchvision round otherwise, here and there by one of 255 steps.
            assert np.abs(found.images.pixel_values - expected.images.pixel_values).max() < 0.1


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["qwen3_vl", "internvl"])
def test_a_checkpoint_brings_back_every_weight_and_moment(family, mode, folders, tmp_path):
    folder = folders[family]
    policy = make(folder, **MODES[mode])
    optimizer = learn(policy, folder)
    save_training_state(policy, optimizer, str(tmp_path))
    again = make(folder, **MODES[mode])
    fresh = torch.optim.AdamW([parameter for parameter in again.parameters() if parameter.requires_grad], lr=0.02)
    load_training_state(again, fresh, str(tmp_path))
    for one, other in ((policy, optimizer), (again, fresh)):
        loss_of(*one.train()(pack(make_batch(folder), CPU), TEMPERATURE, True)[:2]).backward()
        other.step()
    expected = whole(policy)
    assert all(torch.equal(values, expected[name]) for name, values in whole(again).items())


def new(policy) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter for parameter in policy.parameters() if parameter.requires_grad])


# The tower in the run that saved and in the one that loads, whether that one resumes, and the refusal or note.
TOWERS = [
    ("rests", "trained", False, "note: has no vision tower"),
    ("frozen", "trained", False, "note: has no vision tower"),
    ("rests", "trained", True, "freeze_vision_tower=True, or start a new run from these weights"),
    ("trained", "rests", False, r"model\.path="),
    ("trained", "frozen", False, r"model\.path="),
    ("frozen", "rests", True, None),
]


@pytest.mark.parametrize(("before", "then", "resumes", "said"), TOWERS)
def test_no_tower_is_lost_between_runs_without_a_word(before, then, resumes, said, folders, tmp_path):
    path = folders["qwen2_5_vl"]
    saving, loading = make(path, tower=before), make(path, tower=then)
    save_training_state(saving, learn(saving, path) if before != "rests" else new(saving), str(tmp_path))
    optimizer = new(loading) if resumes else None
    if said and not said.startswith("note"):
        with pytest.raises(CheckpointError, match=said):
            load_training_state(loading, optimizer, str(tmp_path))
        assert load_training_state(make(path, tower="rests"), None, str(tmp_path), texts_alone=True) == []
        return
    notes = load_training_state(loading, optimizer, str(tmp_path))
    assert [said and said.removeprefix("note: ") in note for note in notes] == [True] * bool(said)
    expected = whole(saving)
    assert all(torch.equal(values, expected[name]) for name, values in whole(loading).items())
