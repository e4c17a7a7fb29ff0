"""Training in float16: the scale preserves small gradients, an overflow changes no weight, and no NaN is hidden."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from rltrain.common.columns.batch import Batch
from rltrain.common.errors import NonFiniteError
from rltrain.config.load import load_config
from rltrain.config.step_passes import make_step_passes
from rltrain.models.optim import LossScale
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.interface.tasks import MiniBatch, UpdateTask
from tests.distance import distance
from tests.ranks import run_on_ranks
from tests.tiny import save_tiny_model, small_run
from tests.trainer.steps import weights
from tests.workers.test_actor import denominators_of
from tests.workers.test_ranks import record_gradients, sample_batch

# Clipped gradients would hide their size.
GAE = {"algorithm__adv_estimator": "gae", "actor_rollout_ref__actor__optim__clip_grad": 1e9,
       "critic__optim__clip_grad": 1e9}  # fmt: skip
DTYPES = ("actor_rollout_ref__actor__fsdp_config__compute_dtype", "critic__model__fsdp_config__compute_dtype")


def make(folder, dtype, **changes):
    """Make actor and critic, without prompts."""
    keys = GAE | {**dict.fromkeys(DTYPES, dtype), "actor_rollout_ref__rollout__dtype": dtype} | changes
    cfg = load_config(small_run(folder / "model", (folder / "none",) * 2, folder, **keys)).config
    worker = HybridWorker(cfg, {})
    worker.init_models(make_step_passes(cfg))
    return worker


def update(worker, role, batch, learning_rate=0.01, steps=1):
    """Make optimizer steps on the whole batch."""
    minis = (MiniBatch((4, 3), denominators_of(batch)),) * steps
    batch = Batch.concat([batch] * steps)
    if role == "actor":
        return worker.actor.update(batch, UpdateTask(minis, learning_rate))
    return worker.critic.update(batch, minis, learning_rate)


def updater_of(worker, role):
    return getattr(worker, role).updater


def model_of(worker, role):
    return worker.actor.policy if role == "actor" else worker.critic.model


def gradient(folder, dtype, role, factor=1.0, scale=LossScale.FIRST):
    """Return the gradient of a loss that is ``factor`` times the usual one."""
    worker, found = make(folder, dtype), []
    torch.manual_seed(0)
    with torch.no_grad():  # a head of zeros would hand no gradient on
        worker.critic.model.score.weight.to_local().normal_()
    if updater_of(worker, role).loss_scale:
        updater_of(worker, role).loss_scale.state[0] = scale
    scale_loss(getattr(worker, role), factor)
    record_gradients(updater_of(worker, role), model_of(worker, role), found)
    while not found:  # the scale comes down to where nothing overflows
        update(worker, role, sample_batch())
    return found[0].double() / factor


def scale_loss(role, factor: float) -> None:
    loss = role._loss

    def scaled(*arguments, **named):
        share = loss(*arguments, **named)
        return dataclasses.replace(share, loss=share.loss * factor)

    role._loss = scaled


@pytest.fixture
def folder(tmp_path, process_group):
    save_tiny_model(tmp_path / "model", heads=4, kv_heads=2)
    return tmp_path


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradients_in_float16_are_those_in_float32(folder, role):
    """The tolerance is a hundredth, also for a loss so small that many gradients would be 0 without the scale."""
    exact = gradient(folder, "float32", role)
    for factor in (1.0, 3e-6):
        assert distance(gradient(folder, "float16", role, factor), exact) < 0.01
    assert distance(gradient(folder, "float16", role, 3e-6, scale=1.0), exact) > 0.05


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_overflow_changes_no_weight_and_halves_the_scale(folder, role):
    worker = make(folder, "float16")
    scale = updater_of(worker, role).loss_scale
    with torch.no_grad():
        worker.critic.model.score.weight.to_local().normal_()
    before = weights(model_of(worker, role))
    scale.state[0] = 2.0**60
    numbers = update(worker, role, sample_batch(), steps=3)
    assert numbers.overflowed.tolist() == [1, 1, 1]
    assert numbers.skipped.tolist() == [0, 0, 0]
    assert (numbers.loss_scale, numbers.num_made, updater_of(worker, role).num_steps) == (2.0**57, 0, 0)
    assert torch.equal(weights(model_of(worker, role)), before)
    assert not updater_of(worker, role).optimizer.state
    scale.state[0] = 2.0**10
    assert update(worker, role, sample_batch()).num_made == 1
    assert not torch.equal(weights(model_of(worker, role)), before)
    assert not (folder / "incidents").exists()


def test_a_loss_that_is_not_finite_is_no_overflow(folder):
    worker, batch = make(folder, "float16"), sample_batch()
    batch.update({"advantages": batch.ragged("returns").like(batch.ragged("returns").values * torch.nan)})
    with pytest.raises(
        NonFiniteError, match=r"In float16 a number beyond 65,504 may be the cause.*It is kept in .*docs/recovery\.md"
    ):
        update(worker, "actor", batch)
    assert updater_of(worker, "actor").loss_scale.value == LossScale.FIRST


@pytest.mark.parametrize("rule", ["stop", "skip"])
def test_gradients_that_overflow_at_every_scale_end_the_run(folder, rule):
    worker, batch = make(folder, "float16", trainer__on_nonfinite=rule), sample_batch()
    updater = updater_of(worker, "actor")
    updater.loss_scale.state[0] = 4.0
    scale_loss(worker.actor, 1e30)
    if rule == "skip":  # and then it is a step that is skipped, of which the trainer takes three
        numbers = update(worker, "actor", batch, steps=3)
        assert (numbers.overflowed.tolist(), numbers.skipped.tolist()) == ([1, 1, 0], [0, 0, 1])
        return
    with pytest.raises(NonFiniteError, match="although the loss scale was halved, step after step, down to 1"):
        update(worker, "actor", batch, steps=3)


def test_the_scale_doubles_after_two_thousand_steps_and_has_a_bound():
    scale = LossScale()
    for _ in range(LossScale.STEPS_TO_DOUBLE - 1):
        scale.made()
    assert scale.value == LossScale.FIRST
    scale.made()
    assert scale.state.tolist() == [2 * LossScale.FIRST, 0]
    scale.state[0] = LossScale.HIGHEST
    for _ in range(LossScale.STEPS_TO_DOUBLE):
        scale.made()
    assert scale.value == LossScale.HIGHEST


def one_overflows(rank: int, world: int, folder) -> None:
    """Only the gradients of rank 1 overflow."""
    worker = make(folder, "float16")
    if rank == 1:
        scale_loss(worker.actor, 1e30)
    before = weights(worker.actor.policy)
    numbers = update(worker, "actor", sample_batch())
    everybody = [None] * world
    dist.all_gather_object(everybody, (numbers.overflowed.tolist(), numbers.loss_scale))
    assert everybody == [([1.0], LossScale.FIRST / 2)] * world
    assert torch.equal(weights(worker.actor.policy), before)


def test_an_overflow_of_one_rank_is_one_of_all(tmp_path):
    save_tiny_model(tmp_path / "model", heads=4, kv_heads=2)
    run_on_ranks(one_overflows, 2, tmp_path)
