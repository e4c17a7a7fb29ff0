"""Every model is tried on a small copy: numbers that would be wrong are refused in a sentence, and right ones pass."""

import copy

import pytest
import torch
import transformers
from transformers import Qwen3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.base.errors import ConfigError
from rltrain.models import forward
from rltrain.models.attention import packed as attention
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.weights.spec import ModelSpec
from rltrain.run.preflight import model_check
from rltrain.run.preflight.model_check import CannotTry, Wrong, check_numbers, differences
from rltrain.run.preflight.small import random_model, small_copy
from rltrain.workers.rollout.embedded.kv import KeyValues

SPEC = ModelSpec("a/folder", gradient_checkpointing=True)
# The size of Qwen2.5-72B.
LARGE = {
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 152064, "max_window_layers": 70, "eos_token_id": 151643,
}  # fmt: skip
ATTENTION_AND_EXPERTS = {"layers_block_type": ["full_attention", "moe"] * 2, "num_hidden_layers": 4}
# What is peculiar about a family, and its fields.
RIGHT = {
    "qwen2, a large one": ("qwen2", LARGE),
    "mixtral, noise of the router in training": ("mixtral", {"router_jitter_noise": 0.1}),
    "phimoe, experts drawn in training": ("phimoe", {}),
    "diffllama, attention called twice a layer": ("diffllama", {}),
    "gemma4_text, heads of two sizes": ("gemma4_text", {}),
    "afmoe, which views the output of attention": ("afmoe", {}),
    "stablelm, whose layers keep our arguments": ("stablelm", {}),
    "nemotron_h, layers without attention": ("nemotron_h", ATTENTION_AND_EXPERTS),
    "deepseek_v3, latent attention": ("deepseek_v3", {}),
}
REFUSED = {
    "bloom": r"a/folder: Bloom computes attention outside of transformers' attention interface",
    "falcon": "FalconConfig computes attention outside of transformers' attention interface",
    "mpt": "Mpt computes attention outside of transformers' attention interface",
    "modernbert-decoder": "ModernBertDecoder has a head that is more than a matrix",
    "recurrent_gemma": "RecurrentGemmaConfig has layers of kind recurrent",
    "jetmoe": r"JetMoe.* Set actor_rollout_ref.model.enable_gradient_checkpointing=False",
}
# In the oldest transformers, that of the NPU set, DiffLlama's attention is its own, and NemotronH recomputes nothing.
if transformers.__version__.startswith("5.5."):
    del RIGHT["diffllama, attention called twice a layer"], RIGHT["nemotron_h, layers without attention"]
    REFUSED["diffllama"] = "DiffLlamaConfig computes attention outside of transformers' attention interface"


def config_of(family, **changes):
    return CONFIG_MAPPING[family](**changes)


@pytest.mark.parametrize("case", RIGHT)
def test_a_family_that_is_computed_rightly_passes(case):
    family, changes = RIGHT[case]
    differs = differences(PolicyModel, SPEC, config_of(family, **changes), decodes=True)
    assert max(differs.evaluation, differs.training, differs.decoding) < 1e-5
    assert differs.gradient < 1e-4


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_not_is_refused_with_a_remedy(family):
    with pytest.raises(ConfigError, match=REFUSED[family]) as error:
        check_numbers(PolicyModel, SPEC, config_of(family), decodes=True)
    assert "Use a model" in str(error.value) or "Set " in str(error.value)


def refusal(config=None, kind=PolicyModel, spec=SPEC, decodes=True) -> str:
    with pytest.raises(Wrong) as error:
        differences(kind, spec, config or Qwen3Config(), decodes=decodes)
    return str(error.value)


def test_samples_that_see_each_other_are_noticed(monkeypatch):
    attend = attention.attend

    def of_one_text(query, key, value, plan, *more, **keys):
        return attend(query, key, value, plan.of_lengths([plan.num_tokens]), *more, **keys)

    monkeypatch.setattr(attention, "attend", of_one_text)
    assert "takes a packed row for one text" in refusal()
    assert "takes a packed row for one text" in refusal(kind=ScalarModel, decodes=False)


def test_noise_in_training_is_noticed(monkeypatch):
    monkeypatch.setattr(forward.PackedModel, "train", torch.nn.Module.train)
    for family, changes in (("phimoe", {}), ("mixtral", {"router_jitter_noise": 0.1})):
        assert "computes something else in training" in refusal(config_of(family, **changes))


def test_a_wrong_gradient_is_noticed(monkeypatch):
    log_probs = forward.token_log_probs

    def of_half(head, hidden, *more):
        return log_probs(head, (hidden + hidden.detach()) / 2, *more)

    monkeypatch.setattr(forward, "token_log_probs", of_half)
    assert "gets wrong gradients on packed sequences" in refusal()


def test_numbers_that_are_none_do_not_pass(monkeypatch):
    packed_scores = model_check.packed_scores
    monkeypatch.setattr(model_check, "packed_scores", lambda *arguments: packed_scores(*arguments) * torch.nan)
    assert "takes" in refusal() or "outside" in refusal()


def test_a_gradient_that_is_no_number_is_noticed(monkeypatch):
    with_gradient, calls = model_check._with_gradient, []

    def of_nan(model, scores):
        found, gradient = with_gradient(model, scores)
        calls.append(1)
        # Not the first, which is the one that `max` would begin with.
        return found, {
            name: each * (torch.nan if "norm" in name and len(calls) > 1 else 1) for name, each in gradient.items()
        }

    monkeypatch.setattr(model_check, "_with_gradient", of_nan)
    assert "gets wrong gradients" in refusal()


def test_a_small_copy_without_finite_numbers_tells_nothing(monkeypatch):
    plain_scores = model_check.plain_scores
    monkeypatch.setattr(model_check, "plain_scores", lambda *arguments: plain_scores(*arguments) * torch.inf)
    with pytest.raises(CannotTry, match="not finite"):
        differences(PolicyModel, SPEC, Qwen3Config(), decodes=True)


@pytest.mark.parametrize("step", ["decode", "prefill_rest"])
def test_a_wrong_step_of_the_embedded_engine_is_noticed(step, monkeypatch):
    right = getattr(KeyValues, step)
    monkeypatch.setattr(KeyValues, step, lambda *arguments: right(*arguments) * 0.9)
    assert "Use actor_rollout_ref.rollout.name=vllm" in refusal()
    assert differences(PolicyModel, SPEC, Qwen3Config(), decodes=False).decoding is None


def test_a_family_without_a_small_copy_is_told_of():
    note = check_numbers(PolicyModel, SPEC, config_of("blt"), decodes=True)
    assert note.startswith("actor_rollout_ref.model.path=a/folder: whether its numbers are right was not tried, as no")


def test_a_model_is_tried_once_and_draws_no_number(monkeypatch):
    config, state = Qwen3Config(num_hidden_layers=3), torch.get_rng_state()
    assert check_numbers(PolicyModel, SPEC, config, decodes=True) is None
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(model_check, "differences", None)
    assert check_numbers(PolicyModel, SPEC, config, decodes=True) is None


def test_a_small_copy_has_every_kind_of_layer_and_few_weights():
    large, gemma = config_of("qwen2", **LARGE), config_of("gemma3_text")
    before = copy.deepcopy(large.to_dict())
    model = random_model(small_copy(large), decoder_only=False, trust_remote_code=False)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6
    assert large.to_dict() == before
    small = small_copy(gemma)
    assert set(small.layer_types) == set(gemma.layer_types)
    assert small.sliding_window == 5
