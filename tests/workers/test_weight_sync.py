"""Differences between trainer and engine are detected after the sync, or on the responses."""

import pytest
import torch

from rltrain.common.errors import NonFiniteError, SyncError

pytestmark = pytest.mark.usefixtures("process_group")

LR = {"actor_rollout_ref__actor__optim__lr": "0.05"}
STOP = {"actor_rollout_ref__rollout__on_log_prob_gap": "stop"}


@pytest.fixture
def make(tiny_trainer):
    return lambda **changes: tiny_trainer(**LR, **changes)


@pytest.fixture
def make_seeing(make, tmp_path):
    """The same with prompts that have images."""
    pytest.importorskip("torchvision", reason="torchvision is not installed (scripts/test.sh installs it)")
    from tests.tiny_vision import save_tiny_vision_model, write_pictures

    file = str(write_pictures(tmp_path / "pictures.parquet", range(24)))
    keys = {"data__train_files": file, "data__val_files": file, "data__max_prompt_length": 48}

    def trainer(family):
        path = str(save_tiny_vision_model(tmp_path / "seeing", family, tied=False))
        return make(actor_rollout_ref__model__path=path, **keys)

    return trainer


def own_weights(trainer, change=lambda weight: weight._replace(values=weight.values.clone())):
    """Give the engine separate weights, as with several processes. change: returns the new weight, or None to
    lose it."""
    sync = trainer.worker.rollout.weight_sync
    load = sync.engine.load_weights
    sync.engine.load_weights = lambda found: load(filter(None, map(change, found)))
    return sync


def test_steps_without_fault_are_in_sync(make):
    trainer = make(**STOP)
    sync, versions = own_weights(trainer), []
    run = sync.run
    sync.run = lambda version, **how: versions.append(version) or run(version, **how)
    for step in (1, 2, 3):
        metrics = trainer.step(step).metrics
        assert metrics["rollout/log_prob_gap/mean"] < 1e-5
        assert metrics["rollout/canary_gap"] < 1e-5
        assert metrics["rollout/log_prob_gap/alarm"] == 0
        assert metrics["perf/weight_sync_gb"] > 0
        assert len(versions) == len(set(versions)) == step, "one sync for every policy version"


def test_a_second_sync_of_a_version_is_refused(make):
    trainer = make()
    trainer.step(1)
    sync = trainer.worker.rollout.weight_sync
    version = sync.version = trainer.worker.actor.num_updates
    with pytest.raises(SyncError, match="a second sync is a bug"):
        sync.run(version, lambda: None)


def test_a_skipped_sync_is_noticed_by_the_canary(make):
    """The weights are announced and do not arrive, so the engine computes with the old ones."""
    trainer = make()
    sync = own_weights(trainer)
    sync.engine.sleep = lambda: None
    trainer.step(1)
    sync.engine.load_weights = lambda found: [0 for _ in found]
    with pytest.raises(SyncError, match="differs from the trainer"):
        trainer.step(2)


def test_swapped_weights_are_noticed_by_the_canary(make):
    trainer = make()
    names = {f"model.layers.{a}.mlp.down_proj.weight": f"model.layers.{1 - a}.mlp.down_proj.weight" for a in (0, 1)}
    own_weights(trainer, lambda weight: weight._replace(name=names.get(weight.name, weight.name)))
    with pytest.raises(SyncError, match="differs from the trainer"):
        trainer.step(1)


def test_weights_of_the_trainer_that_are_not_finite_are_not_blamed_on_the_sync(make):
    trainer = make()
    next(trainer.worker.actor.policy.parameters()).to_local().detach().fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"not finite after 0 updates: its weights are damaged"):
        trainer.step(1)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_a_damaged_tower_is_noticed_by_the_canary(make_seeing, family):
    """The decoder is right, so only an image shows the error."""
    trainer = make_seeing(family)
    projection = ("visual.merger", "projector")
    own_weights(trainer, lambda w: w._replace(values=-w.values) if any(name in w.name for name in projection) else w)
    with pytest.raises(SyncError, match="on a fixed text with an image"):
        trainer.step(1)


def test_a_forgotten_tower_is_noticed_by_the_canary(make_seeing):
    """The weights of the tower are announced once, and never again."""
    trainer = make_seeing("qwen2_5_vl")
    own_weights(trainer).engine.sleep = lambda: None
    assert trainer.step(1).metrics["rollout/canary_gap"] < 1e-4
    own_weights(trainer, lambda weight: None if "visual" in weight.name else weight)
    with pytest.raises(SyncError, match="on a fixed text with an image"):
        trainer.step(2)


@pytest.mark.parametrize(("action", "stops"), [({}, False), (STOP, True)])
def test_old_answers_are_noticed_in_the_gap(make, action, stops, caplog):
    """As with a stale cache, the weights are right but the generated tokens are not."""
    trainer = make(**action)
    trainer.step(1)
    rollout, before = trainer.worker.rollout, trainer.worker.rollout.generate
    found = before(trainer.experience_task())
    trainer.step(2)
    weights = torch.cat([p.full_tensor().flatten() for p in trainer.worker.actor.policy.parameters()])
    rollout.generate = lambda task: (before(task), found)[1]
    if stops:
        with pytest.raises(SyncError, match="log_prob_gap_limit"):
            trainer.step(3)
        after = torch.cat([p.full_tensor().flatten() for p in trainer.worker.actor.policy.parameters()])
        assert torch.equal(weights, after), "it stops before the update"
        return
    metrics = trainer.step(3).metrics
    assert metrics["rollout/log_prob_gap/alarm"] == 1
    assert metrics["rollout/log_prob_gap/mean"] > 1e-3
    assert "rollout engine and trainer differ" in caplog.text
