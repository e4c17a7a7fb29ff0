"""A checkpoint that lacks weights of its model, or holds them under other names, is refused from its headers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rltrain.base.errors import ConfigError
from rltrain.main_ppo import main
from rltrain.models.files.entries import NoEntries, files_of, read_entries
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.load import read_score_head, read_weights
from rltrain.models.weights.shard import look_at_weights
from rltrain.models.weights.spec import ModelSpec
from tests.models.test_slices import CONFIGS, made
from tests.tiny import save_tiny_model, save_tiny_reward_model, small_run

EMBEDDING, ONE = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"
KEY = "actor_rollout_ref.model.path="


@pytest.fixture
def changed(tiny_model, tmp_path):
    """changed(function of the weights, **fields of config.json): the folder of a model changed so."""

    def make(change=dict, **fields):
        folder = shutil.copytree(tiny_model, tmp_path / "model")
        weights = {name: each.clone() for name, each in change(load_file(folder / "model.safetensors")).items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def looked_at(folder, kind=PolicyModel, **spec):
    spec = ModelSpec(str(folder), **spec)
    return look_at_weights(kind, spec, spec.load_config())


def refused(folder, kind=PolicyModel, **spec):
    with pytest.raises(ConfigError) as error:
        looked_at(folder, kind, **spec)
    return str(error.value)


def renamed(old, new):
    return lambda weights: {name.replace(old, new): each for name, each in weights.items()}


def before(prefix):
    return lambda weights: {prefix + name: each for name, each in weights.items()}


def without(*names):
    return lambda weights: {name: each for name, each in weights.items() if name not in names}


WRONG = {
    "one missing": (without(ONE), f"1 of the 24 weights of Qwen3ForCausalLM are missing in model.safetensors: {ONE}."),
    "module": (before("module."), "all 24 weights of Qwen3ForCausalLM are missing in model.safetensors: model.embed"),
    "module, named": (before("module."), "All 24 other names begin with module. and fit without it."),
    "peft": (before("base_model.model."), "begin with base_model.model. and fit without it"),
    "compiled": (before("_orig_mod."), "begin with _orig_mod. and fit without it"),
    "both": (before("module._orig_mod."), "begin with module._orig_mod. and fit without it"),
    "verl": (before("actor.module."), "begin with actor.module. and fit without it"),
    "other base": (renamed("model.", "transformer."), "begin with transformer. and fit without it"),
    "some": (lambda w: {n if n == ONE else f"module.{n}": w[n] for n in w}, "All 23 other names begin with module."),
    "fsdp": (renamed("layers.", "layers._fsdp_wrapped_module."), "have _fsdp_wrapped_module. in them and fit without"),
    "not merged": (renamed(".q_proj.", ".q_proj.base_layer."), "have base_layer. in them and fit without it. Merge"),
    "peft and not merged": (
        lambda w: before("base_model.model.")(renamed(".q_proj.", ".q_proj.base_layer.")(w)),
        "have base_model.model. and base_layer. in them and fit without it. Merge its adapters",
    ),
    "prefix and one missing": (lambda w: before("module.")(without(ONE)(w)), "begin with module. and all but 1 fit"),
    "adapters beside": (lambda w: w | {f"{ONE[:-7]}.lora_A.weight": torch.ones(1)}, "are not merged, and training"),
    "another model": (lambda w: {"x": torch.ones(1)}, "It has 1 other name instead: x. Copy the model again"),
    "nothing": (lambda w: {}, "all 24 weights of Qwen3ForCausalLM are missing in model.safetensors"),
    "another head": (lambda w: w | {"lm_head.weight": w[EMBEDDING] + 1}, "with other numbers for each"),
    "twice": (lambda w: w | {"model." + ONE: w[ONE] + 1}, f"{ONE} and model.{ONE} are one weight"),
    "another size": (lambda w: w | {ONE: w[ONE][:-2]}, f"{ONE} makes [62, 32], and {ONE} of Qwen3"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_weights_that_are_not_the_models_are_refused(name, changed):
    change, words = WRONG[name]
    said = refused(folder := changed(change))
    assert said.startswith(f"{KEY}{folder}: ")
    assert words in said


def test_what_cannot_be_said_of_a_head_that_is_not_tied_is_that_it_is_there(changed):
    assert "lm_head.weight. Training would begin with random numbers" in refused(changed(tie_word_embeddings=False))


def test_more_layers_than_the_files_have_are_missing(changed):
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    assert "11 of the 35 weights of Qwen3ForCausalLM are missing" in refused(changed(**layers))


@pytest.mark.parametrize(
    ("change", "fields", "words"),
    [
        (dict, {"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "has 1 layers (num_hidden_layers), and"),
        (lambda w: w | {f"{ONE[:-6]}bias": w[ONE][0]}, {}, "Qwen3ForCausalLM does not take 1 weight of model.safe"),
    ],
    ids=["layers", "bias"],
)  # fmt: skip
def test_weights_beside_are_noted(change, fields, words, changed):
    (note,) = looked_at(changed(change, **fields))
    assert words in note


FINE = {
    "as it is": dict,
    "without the base": renamed("model.", ""),
    "the base twice": before("model."),
    "with the tied head": lambda w: w | {"lm_head.weight": w[EMBEDDING]},
    "under the head's name": renamed(EMBEDDING, "lm_head.weight"),
    "old frequencies": lambda w: w | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)},
}


@pytest.mark.parametrize("name", FINE)
def test_what_transformers_reads_is_no_error(name, changed, tiny_model):
    folder = changed(FINE[name])
    assert looked_at(folder) == []
    read, expected = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (folder, tiny_model))
    assert all(torch.equal(read[each], expected[each]) for each in expected)


@pytest.mark.parametrize("kind", [PolicyModel, ScalarModel])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_whole_model_of_every_family_is_fine(family, kind, tmp_path):
    made(CONFIGS[family], tmp_path)
    assert looked_at(tmp_path, kind, role="critic" if kind is ScalarModel else "actor_rollout_ref.actor") == []


def test_a_part_of_stacked_experts_is_named(tmp_path):
    made(CONFIGS["qwen3_moe"], tmp_path)
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    for file in tmp_path.glob("*.safetensors"):
        save_file(without(lost)(load_file(file)), file, metadata={"format": "pt"})
    said = refused(tmp_path)
    assert f"are missing in its 3 files (model-00001-of-00003.safetensors, …): {lost}." in said


def test_other_files_than_safetensors_are_looked_at(changed):
    folder = changed(before("module."))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "missing in pytorch_model.bin" in refused(folder)
    assert "begin with module. and fit without it" in refused(folder)


def test_a_weight_that_differs_from_file_to_file_is_refused(tmp_path):
    save_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    index = {"weight_map": dict.fromkeys(weights, names[0]) | {ONE: names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(weights, tmp_path / names[0], metadata={"format": "pt"})
    save_file({ONE: weights[ONE].clone()}, tmp_path / names[1], metadata={"format": "pt"})
    assert looked_at(tmp_path) == []
    save_file({ONE: weights[ONE] + 1}, tmp_path / names[1], metadata={"format": "pt"})
    assert f"{ONE} stands in {names[0]} and {names[1]} with other numbers" in refused(tmp_path)


# -- other roles -------------------------------------------------------------------------------------------------------


def test_a_critic_of_a_policy_needs_no_head_and_every_other_weight(changed):
    folder = changed()
    assert looked_at(folder, ScalarModel, role="critic") == []
    shutil.rmtree(folder)
    said = refused(folder := changed(without(ONE)), ScalarModel, role="critic")
    assert f"critic.model.path={folder}: 1 of the 24 weights of Qwen3Model are missing" in said


def test_a_reward_model_reads_its_head_from_any_file(tmp_path):
    save_tiny_reward_model(tmp_path)
    expected = read_score_head(str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(read_score_head(str(tmp_path)), expected)
    assert looked_at(tmp_path, ScalarModel, role="reward_model") == []


# -- a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_start_refuses_it_before_ray(more, changed, arithmetic_files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rltrain.run.build.start_ray", lambda cfg: pytest.fail("Ray was started"))
    folder = changed(before("module."))
    assert main([*small_run(folder, arithmetic_files, tmp_path / "run"), *more]) == 2
    output = capsys.readouterr()
    assert f"{KEY}{folder}: all 24 weights of Qwen3ForCausalLM are missing" in output.out + output.err


def test_what_transformers_would_make_up_is_refused_when_it_reads(changed):
    folder = changed(without(ONE))
    with pytest.raises(ConfigError, match="have not 1 weight of Qwen3ForCausalLM: " + ONE):
        read_weights(str(folder), AutoConfig.from_pretrained(folder), torch.float32)


def test_what_is_not_here_is_not_fetched_for_a_look(monkeypatch):
    monkeypatch.setattr("rltrain.models.files.entries.cached_file", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(NoEntries):
        read_entries("some/model")
    assert looked_at_hub() == []


def looked_at_hub():
    return look_at_weights(PolicyModel, ModelSpec("some/model"), CONFIGS["qwen2"])


def test_the_files_are_those_of_the_index(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one", "b": "two"}}')
    (tmp_path / "one").touch()
    with pytest.raises(NoEntries, match="no file two"):
        files_of(str(tmp_path))
