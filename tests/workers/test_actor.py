"""The hybrid worker in this process: no Ray, one rank."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from rltrain.algorithms.aggregation import Denominators
from rltrain.common.columns.batch import Batch
from rltrain.common.errors import NonFiniteError
from rltrain.config.load import load_config
from rltrain.config.step_passes import make_step_passes
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import encode_prompts
from rltrain.data.rows import read_rows
from rltrain.models.attention.packing import pack
from rltrain.models.head import has_fp32_head
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.interface.tasks import GenerateTask, MiniBatch, UpdateTask
from rltrain.workers.rollout.contract import Sampling
from tests.distance import distance
from tests.tiny import small_run

pytestmark = pytest.mark.usefixtures("process_group")

TASK = GenerateTask("train", np.arange(4, dtype=np.int32), 4, Sampling(8), seed=1, step=1)
CALLS = itertools.count(1)


def make_worker(tiny_model, arithmetic_files, tmp_path, **changes):
    """The actor, with ``generate`` of the rollout role."""
    config = load_config(small_run(tiny_model, arithmetic_files, tmp_path, **changes)).config
    store = encode_prompts(read_rows(str(arithmetic_files[0])), chat_encoder(config), 16, True)
    worker = HybridWorker(config, {"train": store, "val": store})
    worker.init_models(make_step_passes(config))
    worker.actor.generate = lambda task: worker.rollout.generate(dataclasses.replace(task, call=next(CALLS)))
    worker.actor.rollout, worker.actor.critic = worker.rollout, getattr(worker, "critic", None)
    return worker.actor


@pytest.fixture
def worker(tiny_model, arithmetic_files, tmp_path):
    return make_worker(tiny_model, arithmetic_files, tmp_path)


def scored(worker) -> Batch:
    """A batch that is ready for the update."""
    batch, _, _ = worker.generate(TASK)
    sizes = [5, 6, 5]
    batch.update(worker.log_probs(batch, sizes)[0])
    batch.update(worker.ref_log_probs(batch, sizes)[0])
    batch.update({"advantage": torch.linspace(-1, 1, len(batch))})
    return batch


def denominators_of(batch: Batch) -> Denominators:
    return Denominators(int(batch.ragged("response").lengths.sum()), len(batch), 8)


def one_step(batch: Batch, learning_rate: float) -> UpdateTask:
    """Make one optimizer step on the whole batch."""
    return UpdateTask((MiniBatch((len(batch),), denominators_of(batch)),), learning_rate)


@pytest.mark.parametrize("sizes", [(16,), (5, 6, 5), (1,) * 16])
def test_with_one_optimizer_step_the_importance_ratio_is_one(worker, sizes):
    """In any micro-batches, the update's forward gives the log-probs of the old_log_prob pass."""
    batch = scored(worker)
    worker.policy.train()
    for micro in batch.split(sizes):
        log_probs, *_ = worker.policy(pack(micro, torch.device("cpu")), 1.0, False)
        ratio = (log_probs - micro.ragged("old_log_probs").values).exp()
        assert distance(ratio, torch.ones_like(ratio)) < 1e-5


def test_actor_reference_and_engine_agree_before_the_update(worker):
    batch = scored(worker)
    actor, reference, engine = (
        batch.ragged(name).values for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")
    )
    assert torch.equal(actor, reference)
    assert distance(engine, actor) < 1e-5


def test_a_head_in_float32_is_that_of_actor_reference_and_engine(tiny_model, arithmetic_files, tmp_path):
    half = dict.fromkeys(
        ("actor_rollout_ref__actor__fsdp_config__compute_dtype", "actor_rollout_ref__rollout__dtype"), "bfloat16"
    )
    log_probs = []
    for wide in (False, True):
        keys = half | {"actor_rollout_ref__model__fp32_head": wide}
        worker = make_worker(tiny_model, arithmetic_files, tmp_path, **keys)
        models = worker.policy.model, worker.reference.model, worker.rollout.engine.model
        assert [has_fp32_head(model.config) for model in models] == [wide] * 3
        batch = scored(worker)
        assert torch.equal(batch.ragged("old_log_probs").values, batch.ragged("ref_log_probs").values)
        log_probs.append(batch.ragged("rollout_log_probs").values[0])
    assert log_probs[0] != log_probs[1]


def test_an_update_moves_the_actor_and_not_the_reference(worker):
    batch = scored(worker)
    numbers = worker.update(batch, one_step(batch, 1e-3))
    assert numbers.grad_norm[0] > 0
    assert all(parameter.grad is None for parameter in worker.policy.parameters())  # none is left for the next step
    again = worker.log_probs(batch, [16])[0].ragged("old_log_probs").values
    good = batch.dense("advantage").repeat_interleave(batch.ragged("response").lengths) > 0
    change = again - batch.ragged("old_log_probs").values
    assert change[good].mean() > change[~good].mean()
    assert torch.equal(
        worker.ref_log_probs(batch, [5, 6, 5])[0].ragged("ref_log_probs").values, batch.ragged("ref_log_probs").values
    )


def test_the_gradient_is_the_same_for_any_cut(worker):
    batch, gradients = scored(worker), []
    parameters = list(worker.policy.parameters())
    worker.updater.optimizer.step = lambda: gradients.append([p.grad.full_tensor() for p in parameters])
    for sizes in [(16,), (3, 7, 6), (1,) * 16, (16, 0)]:
        worker.update(batch, UpdateTask((MiniBatch(sizes, denominators_of(batch)),), 1e-3))
    for other in gradients[1:]:
        assert distance(other, gradients[0]) < 1e-5


def test_samples_repeat_and_validation_draws_other_numbers(worker):
    one, texts, numbers = worker.generate(TASK)
    again, validation = (worker.generate(dataclasses.replace(TASK, split=split))[0] for split in ("train", "val"))
    assert one.ragged("response") == again.ragged("response") != validation.ragged("response")
    assert len(texts) == 16
    assert np.array_equal(numbers.per_sample["response_length"], one.ragged("response").lengths.numpy())


def test_skip_leaves_the_weights_alone(tiny_model, arithmetic_files, tmp_path):
    worker = make_worker(tiny_model, arithmetic_files, tmp_path, trainer__on_nonfinite="skip")
    batch = scored(worker)
    batch.update({"advantage": torch.full((16,), float("nan"))})
    before = {name: p.full_tensor().clone() for name, p in worker.policy.named_parameters()}
    assert worker.update(batch, one_step(batch, 1e-2)).skipped.tolist() == [1.0]
    assert all(torch.equal(p.full_tensor(), before[name]) for name, p in worker.policy.named_parameters())
    stop = make_worker(tiny_model, arithmetic_files, tmp_path)
    with pytest.raises(NonFiniteError, match="no optimizer step was made"):
        stop.update(batch, one_step(batch, 1e-2))
