"""Recomputed layers: gradients bit-equal to those without recomputation; saved activations counted in bytes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rltrain.common.device import get_device
from rltrain.common.errors import ConfigError
from rltrain.config.load import load_config
from rltrain.config.memory_keys import memory_keys
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.shard import empty_packed, sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.run.preflight.meta_run import Ledger
from tests.models.kinds import KINDS, plain_model
from tests.models.test_forward import FAMILIES, SIZES, make_batch
from tests.tiny import small_run

WAYS = (False, True, 2, "selective")
LLAMA = LlamaConfig(**SIZES | {"num_hidden_layers": 6})
MODELS = {name: FAMILIES[name] for name in ("mistral_sliding_window", "qwen3_moe")} | {
    name: KINDS[name] for name in ("gpt_oss, sinks", "qwen3_5, gated delta net")
}


def after_update(folder, way, **changes):
    """Return the gradients, and the bytes of activations between forward and backward."""
    spec = ModelSpec(str(folder), gradient_checkpointing=way, **changes)
    policy, inputs = (
        sharded_model(PolicyModel, spec, get_device("cpu")).train(),
        pack(make_batch(), torch.device("cpu")),
    )
    policy(inputs).log_probs.sum().backward()  # tables are made once
    policy.zero_grad()
    with Ledger() as ledger:
        loss = policy(inputs).log_probs.sum()
        saved = ledger.live["activations"]
    loss.backward()
    return [each.grad.full_tensor() for each in policy.parameters() if each.grad is not None], saved


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bit_equal_to_those_of_kept_activations(name, tmp_path):
    torch.manual_seed(0)
    model = plain_model(name) if name in KINDS else AutoModelForCausalLM.from_config(MODELS[name])
    model.save_pretrained(tmp_path)
    expected, kept = after_update(tmp_path, False)
    for way in (1 if len(model.model.layers) < 2 else 2, True, "selective"):
        found, saved = after_update(tmp_path, way)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), way
        assert saved < kept or way == len(model.model.layers)


@pytest.mark.usefixtures("process_group")
def test_what_is_saved_in_bytes(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(tmp_path)
    none, every, two, selective = (after_update(tmp_path, way)[1] for way in WAYS)
    assert none - two == (none - every) / 6 * 2
    tokens = pack(make_batch(), torch.device("cpu")).plan.num_tokens
    # Of each layer the output of attention and a number per token and head: the logarithm of the softmax's sum.
    assert selective - every == 6 * tokens * (64 + 4) * 4


def test_more_layers_than_the_model_has_are_refused_before_loading():
    spec = ModelSpec("", role="critic", gradient_checkpointing=7)
    problem = (
        r"critic\.model\.enable_gradient_checkpointing=7: the model has 6 layers\. Use at most 6, or True for all\."
    )
    with pytest.raises(ConfigError, match=problem):
        empty_packed(PolicyModel, spec, LLAMA)
    packed = empty_packed(PolicyModel, ModelSpec("", gradient_checkpointing=6), LLAMA)
    assert all(layer.gradient_checkpointing for layer in packed.model.model.layers)


@pytest.mark.parametrize(("way", "named"), [(True, False), (2, True), ("selective", True), (False, True)])
def test_all_layers_is_what_a_full_device_is_told(way, named, tmp_path):
    cfg = load_config(small_run(tmp_path, (tmp_path, tmp_path), tmp_path)).config
    cfg.actor_rollout_ref.model.enable_gradient_checkpointing = way
    change = ("activations", "actor_rollout_ref.model.enable_gradient_checkpointing=True")
    assert (change in memory_keys(cfg, "update_actor")) == named
