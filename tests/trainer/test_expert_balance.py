"""A step balances the load of the experts, by a loss or a bias that does not depend on the layout of the step."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rltrain.common.errors import ConfigError
from rltrain.config.load import load_config
from rltrain.models.routing import correction_biases
from rltrain.models.weights.names import gathered_weights
from rltrain.run.preflight.models import PreflightResult, check_models
from tests.tiny import save_tiny_biased_moe, save_tiny_tokenizer, small_run
from tests.trainer.steps import CHOSEN
from tests.trainer.test_router_replay import MODE, A
from tests.workers.test_moe_engines import CONFIGS

COEF, RATE = A + "router_aux_loss_coef", A + "router_bias_update_rate"
LORA = "actor_rollout_ref__model__"
PATH = LORA + "path"


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


def biases_of(model) -> torch.Tensor:
    return torch.stack(list(correction_biases(model).values())).clone()


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    return save_tiny_biased_moe(tmp_path_factory.mktemp("biased"))


def test_a_bias_moves_by_the_load_of_its_mini_batch_however_it_is_cut(process_group, tiny_trainer, biased):
    keys = {PATH: biased, A + "ppo_mini_batch_size": 4, RATE: 0.25}
    found = []
    cut = {A + "ppo_micro_batch_size_per_gpu": 1, A + "use_dynamic_bsz": False}
    for changes in ({A + "ppo_max_token_len_per_gpu": 4000}, cut, {MODE: "R3"}):
        trainer = tiny_trainer(**keys, **changes)
        actor, seen = trainer.worker.actor, []
        update, before = actor.update, biases_of(actor.policy.model)
        actor.update = lambda batch, task, update=update, seen=seen: (seen.append(update(batch, task)), seen[-1])[1]
        trainer.step(1)
        load = torch.from_numpy(seen[0].expert_load)
        moved = biases_of(actor.policy.model)
        assert torch.equal(moved, before + 0.25 * (load.sum(1, keepdim=True) / 8 - load).sign())
        found.append(moved)
    assert all(torch.equal(each, found[0]) for each in found)
    still = tiny_trainer(**keys | {RATE: 0})
    still.step(1)
    assert torch.equal(biases_of(still.worker.actor.policy.model), before)


def test_each_optimizer_step_moves_the_bias(process_group, tiny_trainer, biased):
    trainer = tiny_trainer(**{PATH: biased, A + "ppo_mini_batch_size": 2, RATE: 0.25})
    actor = trainer.worker.actor
    before = biases_of(actor.policy.model)
    trainer.step(1)
    moved = ((biases_of(actor.policy.model) - before) / 0.25).abs()
    assert moved.max() == pytest.approx(2)
    assert torch.allclose(moved, moved.round(), atol=1e-5)


def test_a_skewed_router_is_balanced_and_engine_and_export_have_its_bias(process_group, tiny_trainer, tmp_path):
    folder = save_tiny_biased_moe(tmp_path / "skewed", n_group=1, topk_group=1)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name][:2] = 0.5  # two experts have nearly all tokens
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    trainer = tiny_trainer(**{PATH: folder, RATE: 0.1, A + "optim__lr": 1e-6})
    steps = [trainer.step(step).metrics for step in range(1, 9)]
    assert steps[0]["moe/max_vio/mean"] > 2
    assert steps[-1]["moe/max_vio/mean"] < steps[0]["moe/max_vio/mean"] / 2
    # The engine samples as the trainer computes: it got the bias.
    assert all(line["training/rollout_probs_diff_max"] < 1e-4 for line in steps)
    policy = trainer.worker.actor.policy
    whole = {weight.name: weight.values for weight in gathered_weights(policy, torch.float32)}
    names = list(correction_biases(policy.model))
    assert len(names) == 2
    assert all(torch.equal(whole[name], bias) for name, bias in correction_biases(policy.model).items())


def test_what_cannot_be_balanced_is_refused(tiny_trainer, tiny_model, moe, biased, arithmetic_files, tmp_path):
    compiled = {A + "fsdp_config__use_torch_compile": True}
    for model, changes, words in (
        (moe, {COEF: 0.1, **compiled}, "compiled layers do not expose"),
        (biased, {RATE: 0.1, **compiled}, "compiled layers do not expose"),
        (biased, {RATE: 0.1, LORA + "lora_rank": 2}, "the bias belongs to the base model under"),
    ):
        with pytest.raises(ConfigError, match=words):
            tiny_trainer(**{PATH: model}, **changes)
    deepseek, half = tmp_path / "deepseek", {A + "fsdp_config__model_dtype": "bfloat16"}
    save_tiny_tokenizer(deepseek)
    AutoModelForCausalLM.from_config(CONFIGS["deepseek_v3"]).save_pretrained(deepseek)
    for model, changes, words in (
        (tiny_model, {COEF: 0.1}, "Qwen3 has no experts. Remove it."),
        (tiny_model, {RATE: 0.1}, "Qwen3 has no experts. Remove it."),
        (moe, {RATE: 0.1}, "the routers of Qwen3Moe have no correction bias that is a buffer"),
        (deepseek, {RATE: 0.1, **half}, "model_dtype=bfloat16 would round the steps of the bias away. Set"),
        (moe, {**compiled, LORA + "lora_rank": 2, LORA + "target_modules": "[q_proj,experts]"}, "target_modules=["),
        (deepseek, {RATE: 0.1}, None),
        (biased, {RATE: 0.1, **half}, None),  # GLM-4-MoE's is float32 all the same
    ):
        check_models(
            load_config(small_run(model, arithmetic_files, tmp_path, **changes)).config, found := PreflightResult()
        )
        assert [words in line for line in found.problems] == [True] * bool(words), found.problems
