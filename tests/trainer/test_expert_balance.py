"""A step learns to use its experts evenly, by a loss that does not depend on how the step is cut."""

import re

import pytest
from transformers import PhimoeConfig

from rltrain.base.errors import ConfigError
from rltrain.models.weights.spec import ModelSpec
from rltrain.run.preflight.model_check import check_routing
from tests.trainer.test_router_replay import CHOSEN, MODE, A, save_moe

COEF = A + "router_aux_loss_coef"
PATH = "actor_rollout_ref__model__path"


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save_moe(tmp_path_factory.mktemp("moe"))


def test_the_loss_does_not_depend_on_cut_or_replay(process_group, tiny_trainer, moe):
    keys = {PATH: moe, A + "ppo_mini_batch_size": 4, COEF: 0.5}
    whole = tiny_trainer(**keys, **{A + "ppo_max_token_len_per_gpu": 4000}).step(1).metrics
    # With every expert alike it would be the number of experts of a token.
    assert whole["moe/aux_loss"] > CHOSEN
    cuts = [{A + "ppo_micro_batch_size_per_gpu": 1, A + "use_dynamic_bsz": False}, {MODE: "R2"}, {MODE: "R3"}]
    for changes in cuts:
        metrics = tiny_trainer(**keys, **changes).step(1).metrics
        for name in ("moe/aux_loss", "moe/max_vio/mean", "actor/grad_norm", "actor/loss"):
            assert metrics[name] == pytest.approx(whole[name], rel=1e-3), (changes, name)
    without = tiny_trainer(**keys | {COEF: 0}).step(1).metrics
    assert "moe/aux_loss" not in without
    assert whole["actor/loss"] == pytest.approx(without["actor/loss"] + 0.5 * whole["moe/aux_loss"], abs=1e-4)
    assert whole["actor/grad_norm"] != pytest.approx(without["actor/grad_norm"], rel=1e-2)


@pytest.mark.parametrize("mode", ["disabled", pytest.param("R3", marks=pytest.mark.long)])
def test_the_load_becomes_more_even(process_group, tiny_trainer, moe, mode):
    trainer = tiny_trainer(**{PATH: moe, COEF: 1.0, MODE: mode, A + "optim__lr": 0.02})
    steps = [trainer.step(step).metrics for step in range(1, 9)]
    assert steps[-1]["moe/max_vio/mean"] < steps[0]["moe/max_vio/mean"] / 1.5
    assert steps[-1]["moe/aux_loss"] < steps[0]["moe/aux_loss"]


def test_a_balance_that_cannot_be_had_is_refused(tiny_trainer, tiny_model, moe):
    key = "actor_rollout_ref.actor.router_aux_loss_coef=0.1"
    with pytest.raises(ConfigError, match=re.escape(f"{key}: layers that are compiled do not show")):
        tiny_trainer(**{PATH: moe, COEF: 0.1, A + "fsdp_config__use_torch_compile": True})
    with pytest.raises(ConfigError, match=re.escape(f"{key}: Qwen3 has no experts. Leave it out.")):
        check_routing(key, ModelSpec(str(tiny_model)), ModelSpec(str(tiny_model)).load_config())
    phimoe = PhimoeConfig(num_local_experts=4, num_hidden_layers=1, hidden_size=32, intermediate_size=16)
    with pytest.raises(ConfigError, match=re.escape(f"{key}: the choice of a layer's experts could not be seen")):
        check_routing(key, ModelSpec(""), phimoe)
