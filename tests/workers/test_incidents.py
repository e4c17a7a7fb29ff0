"""What is kept of a mini-batch that is not finite is all that its loss needs."""

import dataclasses
import os
import pickle

import numpy as np
import pytest
import torch

from rltrain.base.errors import ConfigError, DataError, NonFiniteError
from rltrain.config.load import load_config, to_yaml
from rltrain.tools import replay
from rltrain.workers.incidents import CONFIG, read
from tests.tiny import small_run
from tests.trainer.steps import GAE

pytestmark = pytest.mark.usefixtures("process_group")


def stop(trainer, match):
    """One advantage (or, with a critic, return) of every micro-batch is made NaN, and a step begun."""
    role = trainer.worker.critic if trainer.critic else trainer.worker.actor
    loss, column = role._loss, "returns" if trainer.critic else "advantage"

    def spoiled(micro, *rest):
        values = micro[column] if column == "advantage" else micro.ragged(column).values
        values[0] = torch.nan
        return loss(micro, *rest)

    role._loss = spoiled
    with pytest.raises(NonFiniteError, match=match):
        trainer.step(1)


@pytest.mark.parametrize("changes", [{}, GAE], ids=["actor", "critic"])
def test_the_samples_that_spoil_a_loss_are_named(tiny_trainer, tiny_model, arithmetic_files, tmp_path, changes):
    one = {**changes, "actor_rollout_ref__actor__ppo_mini_batch_size": 4, "critic__ppo_mini_batch_size": 4}
    whole = {name: value for name, value in one.items() if changes or "critic" not in name}
    stop(tiny_trainer(**whole), r"python -m rltrain\.replay")
    (folder,) = (tmp_path / "incidents").iterdir()
    config = load_config(small_run(tiny_model, arithmetic_files, tmp_path, **whole)).config
    (folder / CONFIG).write_text(to_yaml(config))
    (incident,) = read(folder)
    text, failed = replay.replay(folder, [])
    assert failed
    assert f"{'critic' if changes else 'actor'}: 16 samples in {len(incident.mini.micro_sizes)} micro-batches" in text
    assert f"column {'returns' if changes else 'advantage'}: " in text
    starts = np.cumsum([0, *incident.mini.micro_sizes[:-1]])
    assert f"not finite by itself: {len(starts)} of 16 samples (rank/place: " in text
    assert all(f"0/{start}" in text for start in starts)


def test_an_incident_that_cannot_be_kept_hides_no_error(tiny_trainer, tiny_model, tmp_path, caplog):
    (tmp_path / "incidents").write_text("a file in the place of the folder")
    stop(tiny_trainer(), r"no optimizer step was made\. The mini-batch could not be kept in .*incidents")
    assert "the weights of the incident could not be kept" in caplog.text


def test_a_model_that_is_not_here_is_named(tiny_trainer, tiny_model, arithmetic_files, tmp_path, capsys):
    stop(tiny_trainer(), "replay")
    (folder,) = (tmp_path / "incidents").iterdir()
    config = load_config(small_run(tiny_model, arithmetic_files, tmp_path)).config
    (folder / CONFIG).write_text(to_yaml(config))
    assert replay.main([str(folder), "actor_rollout_ref.model.path=/no/model"]) == 2
    assert "actor_rollout_ref.model.path=/no/model: there is no such folder" in capsys.readouterr().err


CODE = {
    "algorithm.adv_estimator": "evil.py:compute_score",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "evil.py:compute_score",
    "actor_rollout_ref.model.trust_remote_code": "True",
}


@pytest.mark.parametrize("broken", [[], ["no_such_key: 1"]])
def test_an_incident_of_somebody_else_runs_nothing(tmp_path, broken, monkeypatch):
    """Not even where the configuration has problems, which are told with what its rules say."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('trace', 'w')\ndef compute_score(*_, **__): return 0\n")
    (tmp_path / "rank_0.pt").write_bytes(b"")
    others = [
        "custom_reward_function: {path: evil.py}",
        "trainer: {device: cpu, callbacks: ['evil.py:compute_score']}",
        "data: {sampler: {name: 'evil.py:compute_score'}}",
    ]
    for key, value in CODE.items():
        (tmp_path / CONFIG).write_text("\n".join([f"{key}: {value}", *others, *broken]))
        with pytest.raises(ConfigError, match="no_such_key" if broken else f"add to the command: .*{key}={value}"):
            replay.replay(tmp_path, [])
    if not broken:
        (tmp_path / CONFIG).write_text("\n".join(others))
        with pytest.raises(DataError, match="cannot be read"):  # the part, which comes next
            replay.replay(tmp_path, [])
    assert not (tmp_path / "trace").exists()


def test_a_crafted_part_of_an_incident_is_refused_and_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trace"),)

    found = {"role": "actor", "rank": 0, "world": 1, "terms": {}, "sizes": [], "batch": {"x": Payload()}}
    torch.save(found, tmp_path / "rank_0.pt")
    with pytest.raises(DataError, match="cannot be read") as caught:
        read(tmp_path)
    assert "weights_only" not in str(caught.value)
    (tmp_path / "rank_0.pt").write_bytes(pickle.dumps(found))
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path)
    assert not (tmp_path / "trace").exists()


def test_pixels_survive_being_kept(tmp_path):
    from rltrain.base.columns.batch import Batch, DictionaryColumn
    from rltrain.data.images import PromptImages
    from rltrain.workers.incidents import _plain, _restored

    images = PromptImages(np.ones((4, 2), np.float32), None, np.array([4]), np.array([1]), np.array([0]), None)
    batch = Batch({"images": DictionaryColumn([images, None], torch.tensor([0, 1, 0]))})
    torch.save(_plain(batch), tmp_path / "batch.pt")
    found = _restored(torch.load(tmp_path / "batch.pt", weights_only=True)["images"])
    assert found.values[1] is None
    for name, value in dataclasses.asdict(images).items():
        assert np.array_equal(getattr(found.values[0], name), value) if value is not None else True


def test_a_folder_that_is_no_incident_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no config\.yaml"):
        replay.replay(tmp_path, [])
    (tmp_path / CONFIG).write_text("{}")
    assert replay.main(["key=value"]) == 2
    with pytest.raises(DataError, match=r"holds no rank_N\.pt"):
        read(tmp_path)
    (tmp_path / "rank_0.pt").write_bytes(b"no tensors")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path)
