"""Every model is tried on a small copy: wrong numbers are refused with a sentence, and right ones pass."""

import copy
import pkgutil

import pytest
import torch
import transformers
from transformers import Qwen3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.common.errors import ConfigError
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.spec import ModelSpec
from rltrain.run.preflight.model_check import CannotTry, Wrong, check_numbers, differences
from rltrain.run.preflight.small import random_model, small_copy

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
    "muse_glimmer, logits times a number; widths between tower and decoder": ("muse_glimmer", {}),
    "glm4v, sections of positions by its code": ("glm4v", {}),
    "ernie4_5_vl_moe, height and width before time": (
        "ernie4_5_vl_moe",
        {
            "text_config": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [22, 22, 20]}
            }
        },
    ),
    "janus, a codec of images": ("janus", {}),
}
REFUSED = {
    "bloom": r"a/folder: Bloom computes attention outside of transformers' attention interface",
    "falcon": "FalconConfig computes attention outside of transformers' attention interface",
    "mpt": "Mpt computes attention outside of transformers' attention interface",
    "modernbert-decoder": "ModernBertDecoder has a head that is more than a matrix",
    "recurrent_gemma": "RecurrentGemmaConfig has layers of kind recurrent",
    "llama4": "Llama4ForConditionalGeneration does not separate its decoder from its head",
    "jetmoe": r"JetMoe.* Set actor_rollout_ref.model.enable_gradient_checkpointing=False",
}
# In the oldest transformers, that of the NPU set, DiffLlama's attention is its own, and NemotronH recomputes nothing.
if transformers.__version__.startswith("5.5."):
    del RIGHT["diffllama, attention called twice a layer"], RIGHT["nemotron_h, layers without attention"]
    del RIGHT["muse_glimmer, logits times a number; widths between tower and decoder"]
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
    assert "Use a " in str(error.value) or "Set " in str(error.value)


KV = "rltrain.workers.rollout.embedded.kv.KeyValues."
# A function of the library, a wrong one made of it, and the refusal.
WRONG = {
    "samples see each other": (
        "rltrain.models.attention.packed.attend",
        lambda right: lambda q, k, v, plan, *more: right(q, k, v, plan.of_lengths([plan.num_tokens]), *more),
        "treats a packed row as one text",
    ),
    "noise in training": (
        "rltrain.models.forward.PackedModel.train",
        lambda right: torch.nn.Module.train,
        "computes different outputs in training",
    ),
    "a wrong gradient": (
        "rltrain.models.forward.token_log_probs",
        lambda right: lambda head, hidden, *more: right(head, (hidden + hidden.detach()) / 2, *more),
        "gets wrong gradients on packed sequences",
    ),
    "no numbers": (
        "rltrain.run.preflight.model_check.packed_scores",
        lambda right: lambda *given: right(*given) * torch.nan,
        "takes|outside",
    ),
    "a copy without finite numbers": (
        "rltrain.run.preflight.model_check.plain_scores",
        lambda right: lambda *given: right(*given) * torch.inf,
        "not finite",
    ),
    "a wrong decode": (KV + "decode", lambda right: lambda *given: right(*given) * 0.9, "rollout.name=vllm"),
    "a wrong prefill": (KV + "prefill_rest", lambda right: lambda *given: right(*given) * 0.9, "rollout.name=vllm"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_are_noticed(name, monkeypatch):
    path, wrong, said = WRONG[name]
    config = config_of("phimoe") if name == "noise in training" else Qwen3Config()
    monkeypatch.setattr(path, wrong(pkgutil.resolve_name(path)))
    with pytest.raises((Wrong, CannotTry), match=said):
        differences(PolicyModel, SPEC, config, decodes=True)
    if path.startswith(KV):
        assert differences(PolicyModel, SPEC, config, decodes=False).decoding is None


def test_a_trial_draws_no_random_number():
    state = torch.get_rng_state()
    assert check_numbers(PolicyModel, SPEC, Qwen3Config(num_hidden_layers=3), decodes=True) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_family_without_a_small_copy_is_told_of():
    note = check_numbers(PolicyModel, SPEC, config_of("blt"), decodes=True)
    assert note.startswith("actor_rollout_ref.model.path=a/folder: its outputs could not be checked: a small copy")


def test_a_small_copy_has_every_kind_of_layer_and_few_weights():
    large, gemma = config_of("qwen2", **LARGE), config_of("gemma3_text")
    before = copy.deepcopy(large.to_dict())
    model = random_model(small_copy(large), decoder_only=False, trust_remote_code=False)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6
    assert large.to_dict() == before
    small = small_copy(gemma)
    assert set(small.layer_types) == set(gemma.layer_types)
    assert small.sliding_window == 5
