"""Complete training steps with LoRA: the same numbers for every layout, one copy of the weights, checkpoints of
adapters."""

import json

import pytest
import torch
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from rltrain.models.weights.lora import lora_layers
from rltrain.workers.interface.tasks import SaveTask
from tests.distance import distance
from tests.trainer.steps import (
    ACTOR,
    GAE,
    Moved,
    actor_weights,
    engine_is_off,
    numbers_of,
)

pytestmark = pytest.mark.usefixtures("process_group")

MODEL = "actor_rollout_ref__model__"
LORA = {MODEL + "lora_rank": 4, MODEL + "lora_alpha": 8, ACTOR + "optim__lr": 0.01}
VARIANTS = {
    "kl loss": {},
    "exact kl in reward, gae": {"algorithm__use_kl_in_reward": True, "algorithm__kl_penalty": "full", **GAE},
    "gae, a critic with adapters": {**GAE, "critic__model__lora_rank": 2, "critic__optim__lr": 0.01},
}  # fmt: skip


@pytest.fixture
def make(twisted_trainer):
    def trainer(**changes):
        made = twisted_trainer(**(LORA | changes))
        engine_is_off(made)
        return made

    return trainer


def frozen_of(model) -> torch.Tensor:
    return torch.cat([p.full_tensor().flatten() for p in model.parameters() if not p.requires_grad]).clone()


# With weights of their own test_step.py has all kinds; here, those that ask for adapters twice.
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_metrics_do_not_depend_on_the_cut(make, variant):
    found = []
    cuts = (
        {ACTOR + "ppo_max_token_len_per_gpu": 25, MODEL + "enable_gradient_checkpointing": True},
        {ACTOR + "use_dynamic_bsz": False, ACTOR + "ppo_micro_batch_size_per_gpu": 3},
    )
    for cut in ({}, cuts[list(VARIANTS).index(variant) % 2]):
        trainer = make(**VARIANTS[variant], **cut)
        policy = trainer.worker.actor.policy
        moved, frozen = Moved(trainer), frozen_of(policy)
        metrics = [numbers_of(trainer.step(step).metrics) for step in (1, 2)]
        assert torch.equal(frozen_of(policy), frozen)
        found.append((moved.by_role(), metrics))
    if "algorithm__use_kl_in_reward" in VARIANTS[variant]:  # the reference has no adapters, so the policy has left it
        assert found[0][1][1]["actor/reward_kl_penalty"] > 1e-6
    assert all(float(moved.norm()) > 0.02 for moved in found[0][0]), "the steps must do something"
    for moved, metrics in found[1:]:
        for mine, theirs in zip(found[0][0], moved, strict=True):
            assert distance(theirs, mine) < 1e-4
        for mine, theirs in zip(found[0][1], metrics, strict=True):
            assert mine == pytest.approx(theirs, abs=2e-4, rel=2e-4)


@pytest.mark.smoke("LoRA: the reference is the actor without adapters")
def test_the_reference_is_the_actor_without_its_adapters(make):
    trainer = make()
    actor = trainer.worker.actor
    assert actor.reference is actor.policy, "no second copy of the weights"
    batch, *_ = trainer.worker.rollout.generate(trainer.experience_task())
    sizes = [5, 6, 5]
    first = actor.ref_log_probs(batch, sizes)[0].ragged("ref_log_probs").values
    assert torch.equal(first, actor.log_probs(batch, sizes)[0].ragged("old_log_probs").values)
    trainer.step(1)
    trainer.step(2)
    assert torch.equal(actor.ref_log_probs(batch, sizes)[0].ragged("ref_log_probs").values, first)
    assert float((actor.log_probs(batch, sizes)[0].ragged("old_log_probs").values - first).abs().max()) > 1e-3
    full = make(**{MODEL + "lora_rank": 0}).worker.actor
    assert torch.equal(full.ref_log_probs(batch, sizes)[0].ragged("ref_log_probs").values, first)


def test_steps_with_adapters_beside_the_weights_are_those_with_merged_ones(twisted_trainer):
    """Every version is synced, after the first one with adapters only. A validation with the same version needs no
    sync."""
    runs = []
    for merge in (True, False):
        trainer = twisted_trainer(**LORA, **{MODEL + "lora__merge": merge})
        runs.append((trainer, [trainer.step(step).metrics for step in (1, 2, 3)]))
    (merged, expected), (trainer, found) = runs
    assert distance(actor_weights(trainer), actor_weights(merged)) < 1e-5
    for metrics, others in zip(found, expected, strict=True):
        assert max(metrics["rollout/canary_gap"], metrics["rollout/log_prob_gap/max"]) < 1e-5
        assert numbers_of(metrics) == pytest.approx(numbers_of(others), abs=1e-4, rel=1e-3)
    policy = trainer.worker.actor.policy
    adapters = sum(4 * weight.numel() for weight in policy.parameters() if weight.requires_grad)
    sizes = [round(metrics["perf/weight_sync_gb"] * 2**30) for metrics in found]
    assert sizes[0] > 2 * adapters
    assert sizes[1:] == [adapters, adapters]


def test_a_checkpoint_holds_adapters_and_nothing_kept_elsewhere(make, tiny_model, tmp_path):
    trainer = make()
    trainer.step(1)
    trainer.actor.begin_save(SaveTask(str(tmp_path / "actor"))).finish()
    stored = FileSystemReader(tmp_path / "actor").read_metadata().state_dict_metadata
    assert all(".lora_A." in name or ".lora_B." in name for name in stored)
    actor = trainer.worker.actor
    assert len([name for name in stored if name.startswith("model.")]) == 2 * len(list(lora_layers(actor.policy)))
    config = json.loads((tmp_path / "actor/lora_adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    trainer.actor.begin_save(SaveTask(str(tmp_path / "again"), export=str(tmp_path / "merged"))).finish()
    tokens = torch.arange(5, 20)[None]
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        plain = base(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "actor/lora_adapter")(tokens).logits
    assert distance(merged, adapted) < 1e-5
    assert float((merged - plain).abs().max()) > 0.01
    # A run of its own starts from that folder.
    other = make(**{MODEL + "lora_rank": 0, MODEL + "lora_adapter_path": tmp_path / "actor/lora_adapter"})
    assert torch.equal(actor_weights(other), actor_weights(trainer))
