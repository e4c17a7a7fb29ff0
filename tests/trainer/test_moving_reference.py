"""`ref.model.path` and `ref.update_every_steps`: another reference, and one that becomes the policy or a mixture."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.common.errors import CheckpointError
from rltrain.config.check import broken_rules
from rltrain.config.load import load_config
from rltrain.config.notes import without_effect
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.resume import find_resume_point
from rltrain.run.checkpoints.saver import Saver
from rltrain.run.checkpoints.thin import thin
from tests.distance import distance
from tests.tiny import save_tiny_model, small_run
from tests.trainer.steps import ACTOR, actor_weights, weights

REF = "actor_rollout_ref__ref__"
KEY = "actor_rollout_ref.ref.update_every_steps"
EVERY_2 = {REF + "update_every_steps": 2}


def reference_of(trainer) -> torch.Tensor:
    return weights(trainer.worker.actor.reference)


@pytest.mark.parametrize("changes", [{}, {ACTOR + "kl_loss_type": "full"}], ids=["sampled", "exact"])
def test_after_every_second_step_the_reference_is_the_policy(make, changes):
    trainer = make(**EVERY_2, **changes)
    start, metrics = reference_of(trainer), [trainer.step(1).metrics]
    assert torch.equal(reference_of(trainer), start)
    metrics.append(trainer.step(2).metrics)
    moved = actor_weights(trainer)
    assert torch.equal(reference_of(trainer), moved)
    assert not torch.equal(moved, start)
    metrics.append(trainer.step(3).metrics)
    assert torch.equal(reference_of(trainer), moved)
    assert [each["actor/ref_moved"] for each in metrics] == [0, 1, 0]
    # Of two optimizer steps the first finds no KL where the reference has just become the policy.
    assert metrics[2]["actor/kl_loss"] < metrics[1]["actor/kl_loss"]


def test_a_mixture_has_its_share_of_both(make):
    trainer = make(**{REF + "update_every_steps": 1, REF + "update_mix": 0.25})
    expected = reference_of(trainer)
    for step in (1, 2):
        trainer.step(step)
        expected = 0.25 * actor_weights(trainer) + 0.75 * expected
    assert distance(reference_of(trainer), expected) < 1e-6


def test_a_thinned_checkpoint_keeps_it_and_a_run_that_would_not_move_it_is_refused(make, tmp_path):
    trainer = make(**EVERY_2)
    for step in (1, 2, 3):
        trainer.step(step)
    folder = RunFolder(trainer.cfg.trainer.default_local_dir)
    saver = Saver(trainer.cfg, folder, trainer.actor, None, "data", 16, reference=trainer.reference)
    saver.save(3, trainer.progress)
    saver.finish()
    with pytest.raises(CheckpointError, match=rf"{KEY}: 2 then, None now"):
        find_resume_point(make().cfg, folder, "data")
    thin(folder, 3)
    other = make(**EVERY_2)
    assert not torch.equal(reference_of(other), reference_of(trainer))
    other.reference.load(str(folder.step_folder(3) / "ref"), False)
    assert torch.equal(reference_of(other), reference_of(trainer))
    # A new run from the weights alone begins with its own reference.
    start = make(**EVERY_2)
    before = reference_of(start)
    assert start.reference.load(str(folder.step_folder(3) / "ref"), True) == []
    assert torch.equal(reference_of(start), before)
    folder.release()


def settings(tmp_path, **changes):
    return load_config(small_run(tmp_path, (tmp_path, tmp_path), tmp_path, **EVERY_2, **changes))


def test_adapters_cannot_move_and_without_a_reference_nothing_does(tmp_path):
    (problem,) = broken_rules(settings(tmp_path, actor_rollout_ref__model__lora_rank=2))
    assert problem.startswith(
        f"{KEY}=2: with LoRA the reference is the policy without its adapters, which does not change"
    )
    alone = settings(tmp_path, actor_rollout_ref__actor__use_kl_loss=False)
    assert broken_rules(alone) == []
    assert any(note.startswith(f"{KEY}: no effect") for note in without_effect(alone))


@pytest.mark.parametrize("kind", ["k1", "full"])
def test_the_kl_is_to_the_model_that_is_named(process_group, tiny_trainer, tiny_model, tmp_path, kind):
    another = save_tiny_model(tmp_path / "model", seed=7, width=64)

    def trainer(**changes):
        return tiny_trainer(actor_rollout_ref__actor__kl_loss_type=kind, **changes)

    def kl(**changes):
        return trainer(**changes).step(1).metrics["actor/kl_loss"]

    key = REF + "model__path"
    loaded = trainer(**{key: another}).worker.actor.reference.model.state_dict()
    saved = AutoModelForCausalLM.from_pretrained(another).state_dict()
    assert any(name in loaded for name in saved)
    assert all(torch.equal(loaded[name].full_tensor(), saved[name]) for name in saved if name in loaded)
    assert abs(kl()) < 0.05 < abs(kl(**{key: another}))
    assert kl(**{key: tiny_model}) == kl()
