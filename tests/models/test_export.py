"""The exported folder: a model that is served as it was trained."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rltrain.data.chat import ChatEncoder
from rltrain.models.load import load_config
from rltrain.models.weights.export import Export, find_problems
from tests.distance import distance
from tests.exported import export_huggingface
from tests.models.test_forward import make_policy
from tests.tiny import TEMPLATE, save_tiny_biased_moe

pytestmark = pytest.mark.usefixtures("process_group")

GENERATION = {"eos_token_id": [1, 3], "do_sample": True, "temperature": 0.6, "top_p": 0.95}
MINE = "mine: " + TEMPLATE


@pytest.fixture
def source(tiny_model, tmp_path) -> Path:
    """A folder like those of instruction-tuned models, with files that only the owner may read."""
    folder = tmp_path / "source"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    (folder / "README.md").write_text("of the model it came from")
    for file in folder.iterdir():
        file.chmod(0o600)
    return folder


def export(path, folder: Path, **changes) -> list[str]:
    path = str(path)
    return export_huggingface(make_policy(path), load_config(path), ChatEncoder(path, **changes), str(folder))


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


def test_end_tokens_and_sampling_of_the_source_are_exported(source, tmp_path):
    out = tmp_path / "out"
    assert export(source, out) == []
    exported = GenerationConfig.from_pretrained(out)
    assert {name: getattr(exported, name) for name in GENERATION} == GENERATION
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / "README.md").exists()
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == [1, 3]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_exported_files_are_as_readable_as_new_files(source, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        export(source, tmp_path / "out")
    finally:
        os.umask(before)
    assert modes(tmp_path / "out") == {mode}


def test_the_template_that_was_used_is_exported(source, tmp_path):
    # Older folders hold it in other places too, and servers read those.
    settings = source / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    (source / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (tmp_path / "mine.jinja").write_text(MINE)
    out = tmp_path / "out"
    assert export(source, out, chat_template=str(tmp_path / "mine.jinja")) == []
    assert AutoTokenizer.from_pretrained(out).chat_template == MINE
    assert (out / "chat_template.jinja").read_text() == MINE
    for name in ("tokenizer_config.json", "chat_template.json"):
        assert json.loads((out / name).read_text())["chat_template"] == MINE


def test_without_generation_config_the_end_tokens_are_exported(source, tmp_path):
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": 4}))
    assert export(source, tmp_path / "out") == []
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [1]


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("config.json", lambda file: file.write_text("{"), "config.json does not load"),
        ("tokenizer.json", lambda file: file.write_text("{"), "tokenizer_config.json does not load"),
        ("chat_template.jinja", lambda file: file.write_text(MINE), "chat_template.jinja is not the template"),
        ("generation_config.json", lambda file: file.write_text('{"eos_token_id": 1}'),
         "generation_config.json ends responses at tokens [1], in training at [1, 3]"),
        ("model.safetensors", lambda file: file.write_bytes(file.read_bytes()[:50]), "model.safetensors does not load"),
        ("model.safetensors", lambda file: save_file(dict(list(load_file(file).items())[1:]), file), "has shape None"),
    ],
)  # fmt: skip
def test_an_export_that_would_not_serve_is_named_by_its_file(source, tmp_path, file, damage, said):
    out = tmp_path / "out"
    export(source, out)
    shapes = {name: tuple(weight.shape) for name, weight in load_file(out / "model.safetensors").items()}
    encoder = ChatEncoder(str(source))
    assert find_problems(out, encoder, shapes) == []
    damage(out / file)
    assert any(said in problem for problem in find_problems(out, encoder, shapes))


def test_copies_are_of_their_moment_and_their_memory_is_kept(source, tmp_path):
    path, written = str(source), load_file(source / "model.safetensors")
    policy = make_policy(path)
    exported = Export(policy, load_config(path), ChatEncoder(path))
    assert exported.num_bytes == sum(each.nbytes for each in written.values())
    for name, more in (("first", 0), ("second", 1)):
        exported.gather(copies=True)
        assert exported.num_bytes == 0
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1)
        (tmp_path / name).mkdir()
        assert exported.write(tmp_path / name, "", {}) == []
        found = load_file(tmp_path / name / "model.safetensors")
        assert distance(found, {key: each + more for key, each in written.items()}) == 0


@pytest.mark.parametrize("copies", [False, True])
def test_what_corrects_the_choice_of_experts_is_exported_as_it_is(tmp_path, copies):
    """Half-precision checkpoints hold the correction bias in float32, because steps of a thousandth are lost in
    bfloat16."""
    source = save_tiny_biased_moe(tmp_path / "source", dtype="bfloat16")
    weights = {name: weight.bfloat16() for name, weight in load_file(source / "model.safetensors").items()}
    biases = {name: torch.linspace(1.0, 1.007, 8) for name in weights if name.endswith("e_score_correction_bias")}
    save_file(weights | biases, source / "model.safetensors", {"format": "pt"})
    export = Export(make_policy(source), load_config(str(source)), ChatEncoder(str(source)))
    export.gather(copies)
    assert export.write(tmp_path / "out", "", {}) == []
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert biases
    assert all(torch.equal(exported[name], bias) for name, bias in biases.items())
    assert {exported[name].dtype for name in exported.keys() - biases.keys()} == {torch.bfloat16}
