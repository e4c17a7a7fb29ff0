"""Whole training steps with LoRA: the same numbers for every cut, one copy of the weights, checkpoints of adapters."""

import json

import pytest
import torch
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from rltrain.config.load import load_config
from rltrain.models.attention.packing import pack
from rltrain.models.weights.lora import lora_layers
from rltrain.run.checkpoints.resume import frozen_values
from rltrain.run.preflight.models import Findings, look_at_models
from rltrain.trainer.progress import Progress
from rltrain.workers.tasks import SaveTask
from tests import local
from tests.distance import distance
from tests.tiny import small_run
from tests.trainer.steps import (
    ACTOR,
    CORRECTION,
    GAE,
    NO_KL,
    Moved,
    actor_weights,
    engine_is_off,
    numbers_of,
    weights,
)
from tests.trainer.test_router_replay import save_moe

pytestmark = pytest.mark.usefixtures("process_group")

MODEL = "actor_rollout_ref__model__"
LORA = {MODEL + "lora_rank": 4, MODEL + "lora_alpha": 8, ACTOR + "optim__lr": 0.01}
VARIANTS = {
    "kl loss": {},
    "exact kl": {ACTOR + "kl_loss_type": "full"},
    "exact kl, gathered weights kept": {
        ACTOR + "kl_loss_type": "full", ACTOR + "fsdp_config__reshard_after_forward": False,
    },
    "exact kl in reward, gae": {"algorithm__use_kl_in_reward": True, "algorithm__kl_penalty": "full", **GAE},
    "gae, a critic with adapters": {**GAE, "critic__model__lora_rank": 2, "critic__optim__lr": 0.01},
    "bypass": {CORRECTION + "bypass_mode": True},
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


# With weights of their own test_step.py has all kinds in every run; here, those that ask for adapters twice.
ALWAYS = ("kl loss", "exact kl in reward, gae", "gae, a critic with adapters")


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.long] * (name not in ALWAYS)) for name in VARIANTS]
)
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
    assert all(float(moved.norm()) > 0.02 for moved in found[0][0]), "the steps must do something"
    for moved, metrics in found[1:]:
        for mine, theirs in zip(found[0][0], moved, strict=True):
            assert distance(theirs, mine) < 1e-4
        for mine, theirs in zip(found[0][1], metrics, strict=True):
            assert mine == pytest.approx(theirs, abs=2e-4, rel=2e-4)


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


def test_the_exact_kl_leaves_out_adapters(make):
    """Against a trainer with a reference of its own."""
    keys = {ACTOR + "kl_loss_type": "full", "actor_rollout_ref__rollout__temperature": 0.8}
    trainer = make(**keys, **{MODEL + "target_modules": "[q_proj]"})
    actor = trainer.worker.actor
    other = make(**keys, **{MODEL + "lora_rank": 0}).worker.actor
    for step in (1, 2):
        trainer.step(step)
    batch, *_ = trainer.worker.rollout.generate(trainer.experience_task())
    inputs = pack(batch, torch.device("cpu"))
    with torch.no_grad():
        expected = actor.policy(inputs, 0.8, False, other._exact_reference.states(inputs)).kl
        found = actor._exact_kl(batch)
    assert float(expected.max()) > 1e-3
    assert distance(found, expected) < 1e-3


def test_the_engine_samples_from_the_merged_weights(make):
    trainer = make(**NO_KL)
    for step in (1, 2):
        assert trainer.step(step).metrics["rollout/canary_gap"] < 1e-5
    actor, rollout = trainer.worker.actor, trainer.worker.rollout
    batch, *_ = type(rollout).generate(rollout, trainer.experience_task())
    trained = actor.log_probs(batch, [16])[0].ragged("old_log_probs").values
    assert distance(batch.ragged("rollout_log_probs").values, trained) < 1e-5


def test_steps_with_adapters_beside_the_weights_are_those_with_merged_ones(twisted_trainer):
    """A sync of every version, of adapters alone after the first; validation and the same version need none."""
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


@pytest.mark.parametrize("merge", [True, False])
def test_training_resumes_from_adapters_bit_for_bit(make, tmp_path, merge):
    changes = VARIANTS["gae, a critic with adapters"] | {MODEL + "lora__merge": merge}
    whole = make(**changes)
    for step in (1, 2):
        whole.step(step)
    for name in ("actor", "critic"):
        getattr(whole, name).begin_save(SaveTask(str(tmp_path / name))).finish()
    expected = whole.step(3).metrics
    resumed = make(**changes)
    for name in ("actor", "critic"):
        getattr(resumed, name).load(str(tmp_path / name), False)
    resumed.restore(Progress(2, None))
    for _ in range(32):  # the twist counts answers
        resumed.pool.twist(0, 0.0)
    assert numbers_of(resumed.step(3).metrics) == numbers_of(expected)
    assert torch.equal(actor_weights(whole), actor_weights(resumed))
    assert torch.equal(weights(whole.worker.critic.model), weights(resumed.worker.critic.model))


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


def test_a_resumed_run_must_have_the_same_adapters(make):
    plain, lora, scaled = (
        frozen_values(make(**keys).cfg) for keys in ({MODEL + "lora_rank": 0}, {}, {MODEL + "lora_alpha": 9})
    )
    assert not [key for key in plain if "lora" in key], "checkpoints of full training stay as they were"
    assert lora["actor_rollout_ref.model.lora_rank"] == 4
    assert lora != scaled


# At every run: test_the_engine_samples_from_the_merged_weights, and gradients in tests/models/test_lora.py.
@pytest.mark.long
def test_adapters_learn_what_all_weights_learn(make, monkeypatch):
    """Reward: the share of ones in the answer."""
    monkeypatch.setattr(local, "find_scorer", lambda source: lambda text, *rest: text.count("1") / max(len(text), 1))
    gains = []
    for keys in ({}, {MODEL + "lora_rank": 0, ACTOR + "optim__lr": 0.003}):
        trainer = make(**NO_KL, **keys, **{ACTOR + "optim__eps": 1e-8}, trainer__total_training_steps=20)
        trainer.pool.twist = lambda row, score: score
        rewards = [trainer.step(step).metrics["critic/rewards/mean"] for step in range(1, 21)]
        gains.append(sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3)
    assert min(gains) > 0.2, gains


def test_adapters_of_experts_are_not_compiled(arithmetic_files, tmp_path):
    changes = {**LORA, MODEL + "target_modules": "[q_proj,experts]", ACTOR + "fsdp_config__use_torch_compile": True}
    found = Findings()
    look_at_models(load_config(small_run(save_moe(tmp_path), arithmetic_files, tmp_path, **changes)).config, found)
    assert [problem.partition(":")[0] for problem in found.problems] == [
        "actor_rollout_ref.model.target_modules=['q_proj', 'experts']"
    ]
