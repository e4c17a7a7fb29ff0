"""A checkpoint that lacks weights of its model, or stores them under other names, is refused after its headers are
read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rltrain.common.errors import ConfigError
from rltrain.main_ppo import main
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.weights.shard import check_weight_files
from rltrain.models.weights.spec import ModelSpec
from tests.models.test_slices import CONFIGS, made
from tests.tiny import small_run

EMBEDDING, ONE = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"
KEY = "actor_rollout_ref.model.path="


@pytest.fixture
def changed(tiny_model, tmp_path):
    """changed(function of the weights, **fields of config.json): return the changed folder of a model."""

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
    return check_weight_files(kind, spec, spec.load_config())


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
    "peft": (before("base_model.model."), "start with base_model.model. and fit without it"),
    "other base": (renamed("model.", "transformer."), "start with transformer. and fit without it"),
    "some": (lambda w: {n if n == ONE else f"module.{n}": w[n] for n in w}, "All 23 other names start with module."),
    "fsdp": (renamed("layers.", "layers._fsdp_wrapped_module."), "have _fsdp_wrapped_module. in them and fit without"),
    "not merged": (renamed(".q_proj.", ".q_proj.base_layer."), "have base_layer. in them and fit without it. Merge"),
    "prefix and one missing": (lambda w: before("module.")(without(ONE)(w)), "start with module. and all but 1 fit"),
    "adapters beside": (lambda w: w | {f"{ONE[:-7]}.lora_A.weight": torch.ones(1)}, "are not merged, so training"),
    "another model": (lambda w: {"x": torch.ones(1)}, "It has 1 other name instead: x. Copy the model again"),
    "another head": (lambda w: w | {"lm_head.weight": w[EMBEDDING] + 1}, "have different values for them"),
    "twice": (lambda w: w | {"model." + ONE: w[ONE] + 1}, f"{ONE} and model.{ONE} are one weight"),
    "another size": (lambda w: w | {ONE: w[ONE][:-2]}, f"{ONE} makes [62, 32], and {ONE} of Qwen3"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_weights_that_are_not_the_models_are_refused(name, changed):
    change, words = WRONG[name]
    said = refused(folder := changed(change))
    assert said.startswith(f"{KEY}{folder}: ")
    assert words in said


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


# -- other roles -------------------------------------------------------------------------------------------------------


def test_a_critic_of_a_policy_needs_no_head_and_every_other_weight(changed):
    folder = changed()
    assert looked_at(folder, ScalarModel, role="critic") == []
    shutil.rmtree(folder)
    said = refused(folder := changed(without(ONE)), ScalarModel, role="critic")
    assert f"critic.model.path={folder}: 1 of the 24 weights of Qwen3Model are missing" in said


# -- a run ---------------------------------------------------------------------------------------------------------


def test_a_start_refuses_it_before_ray(changed, arithmetic_files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rltrain.run.build.start_ray", lambda cfg: pytest.fail("Ray was started"))
    folder = changed(before("module."))
    for more in ([], ["--dry-run"]):
        assert main([*small_run(folder, arithmetic_files, tmp_path / "run"), *more]) == 2
        output = capsys.readouterr()
        assert f"{KEY}{folder}: all 24 weights of Qwen3ForCausalLM are missing" in output.out + output.err
