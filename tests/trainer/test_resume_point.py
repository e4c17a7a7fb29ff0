"""The start of a run: its own newest checkpoint, or a named one, and the settings that must be unchanged."""

import json
import logging
import pickle
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from rltrain import __version__
from rltrain.common.errors import CheckpointError, ConfigError
from rltrain.config.load import load_config
from rltrain.config.schema import Config
from rltrain.models.files.digest import digest_of_weights
from rltrain.run.changes import log_changes, log_finished, write_config
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.manifest import read_record
from rltrain.run.checkpoints.resume import ResumePoint, files_of, find_resume_point, verified
from rltrain.trainer.progress import Progress
from tests.trainer.saves import GRPO, saver_of
from tests.trainer.test_checkpoint import add_digests, flip, rewrite_manifest


def change_record(folder: RunFolder, step: int, change) -> None:
    """Change progress.json of a checkpoint, as if another version had written it."""
    checkpoint = folder.step_folder(step)
    record = read_record(checkpoint)
    change(record)
    (checkpoint / "progress.json").write_text(json.dumps(record))
    rewrite_manifest(
        checkpoint, lambda files: files["progress.json"].update(bytes=(checkpoint / "progress.json").stat().st_size)
    )
    add_digests(checkpoint)


def test_a_checkpoint_of_another_version_is_refused(folder):
    saver, cfg = saver_of(folder, GRPO)
    saver.save(1, Progress())
    record = read_record(folder.step_folder(1))
    assert (record["version"], record["digest"]) == (__version__, "rows")
    change_record(folder, 1, lambda record: record.pop("in_flight"))
    with pytest.raises(CheckpointError, match=r"another version of rltrain.*lacks in_flight.*resume_weights_only=True"):
        find_resume_point(cfg, folder, "rows:1 5 rows of a.parquet")


@pytest.mark.parametrize(
    ("before", "key", "then", "now"),
    [
        (GRPO, "actor_rollout_ref.actor.freeze_vision_tower", "False", "True"),
        (GRPO, "data.max_pixels", "None", "9000"),
        ("critic.model.lora_rank=4", "critic.model.path", "/one", "/two"),
    ],
)
def test_what_a_checkpoint_was_made_of_must_stay(folder, before, key, then, now):
    first = [before, *([f"{key}={then}"] if then.startswith("/") else [])]
    saver_of(folder, *first)[0].save(1, Progress())
    (folder.step_folder(1) / "critic").mkdir()
    same = saver_of(folder, *first)[1]
    assert find_resume_point(same, folder, None).step == 1
    other = saver_of(folder, before, f"{key}={now}")[1]
    with pytest.raises(CheckpointError, match=f"{key}: {then} then, {now} now"):
        find_resume_point(other, folder, None)
    if before == GRPO:
        assert find_resume_point(other, folder, None, images=False).step == 1
    # Checkpoints that were made before the key existed resume.
    change_record(folder, 1, lambda record: record["frozen"].pop(key))
    assert find_resume_point(same if before == GRPO else other, folder, None).step == 1


def test_moments_of_another_dtype_are_reported(folder, caplog):
    saver, cfg = saver_of(folder, GRPO)
    saver.save(1, Progress())
    saved = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([1]), [])
    (actor := folder.step_folder(1) / "actor").mkdir(exist_ok=True)
    (actor / ".metadata").write_bytes(pickle.dumps(Metadata({"optimizer.weight.exp_avg": saved}, storage_data={})))
    with caplog.at_level(logging.WARNING):
        find_resume_point(cfg, folder, None)
    key = "actor_rollout_ref.actor.optim.moments"
    assert f"{key}=auto: the moments in {actor} are in bfloat16, and are converted to float32." in caplog.text
    assert f"set {key}=bfloat16" in caplog.text
    caplog.clear()
    find_resume_point(saver_of(folder, GRPO, f"{key}=bfloat16")[1], folder, None)
    assert "moments" not in caplog.text


@pytest.mark.parametrize(
    ("key", "with_it"),
    [
        ("actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_rank=4"),
        ("actor_rollout_ref.model.path", "actor_rollout_ref.actor.use_kl_loss=True"),
        ("distillation.teacher.model.path", "distillation.enabled=True"),
        ("reward_model.model.path", "reward_model.enable=True"),
    ],
)
def test_other_weights_under_the_path_of_a_frozen_model_are_refused(folder, tmp_path, key, with_it):
    digest_of_weights.cache_clear()
    weights = tmp_path / "base" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"one")
    saver, cfg = saver_of(folder, GRPO, with_it, f"{key}={weights.parent}")
    saver.save(1, Progress())
    assert find_resume_point(cfg, folder, None).step == 1
    weights.write_bytes(b"two")
    assert find_resume_point(cfg, folder, None).step == 1, "the weights count that this process has begun with"
    digest_of_weights.cache_clear()
    # An evaluation needs the weights under adapters; a run that does not use a model may find any there.
    evaluation = saver_of(folder, GRPO, with_it, f"{key}={weights.parent}", "trainer.val_only=True")[1]
    plain = saver_of(folder, GRPO, f"{key}={weights.parent}")[1]
    for refused in [cfg, evaluation] if "lora" in with_it else [cfg]:
        with pytest.raises(CheckpointError, match=rf"base \({key}\) has other weights than when the checkpoint was"):
            find_resume_point(refused, folder, None)
    for taken in [] if "lora" in with_it else [plain, evaluation]:
        assert find_resume_point(taken, folder, None).step == 1


RECORDED = Path(__file__).parent / "recorded"
ROWS = "rows:ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb 2048 rows of train.parquet"


def recorded(folder: RunFolder, name: str) -> Config:
    """Return a checkpoint of step 4 with the progress.json of another version, and the settings of that run."""
    _, cfg = saver_of(folder, GRPO)
    temporary = folder.begin_save(4, files_of(Progress(batches_drawn=4), 4, cfg, ROWS))
    shutil.copy(RECORDED / f"{name}.json", temporary / "progress.json")
    folder.commit(temporary, 4, {})
    return cfg


def test_a_checkpoint_of_0_1_0_resumes(folder, caplog):
    caplog.set_level(logging.INFO)
    cfg = recorded(folder, "progress_0_1_0")
    assert "version" not in read_record(folder.step_folder(4))
    start = find_resume_point(cfg, folder, ROWS)
    assert (start.step, start.progress.batches_drawn) == (4, 4)
    assert "4 steps are done, saved by rltrain 0.1.0" in caplog.text
    cfg.trainer.val_only = True
    find_resume_point(cfg, folder, ROWS)
    assert f"weights: {folder.step_folder(4)}: 4 steps are done" in caplog.messages[-1]
    with pytest.raises(
        CheckpointError, match=r"another run, saved by rltrain 0.1.0 \(training data: 2048 rows of train"
    ):
        find_resume_point(cfg, folder, "rows:2 4 rows of b.parquet")


def test_other_training_data_is_refused_by_name(folder):
    saver, cfg = saver_of(folder, GRPO)
    saver.save(1, Progress())
    assert find_resume_point(cfg, folder, "rows:1 5 rows of renamed.parquet").step == 1
    with pytest.raises(CheckpointError, match=r"5 rows of a.parquet then, 4 rows of b.parquet now") as caught:
        find_resume_point(cfg, folder, "rows:2 4 rows of b.parquet")
    assert "rows:" not in str(caught.value)


@pytest.mark.parametrize(("mode", "weights_only"), [("resume_path", True), ("resume_path", False), ("disable", True)])
def test_a_run_that_began_elsewhere_goes_on_too(folder, tmp_path, caplog, mode, weights_only):
    old = RunFolder(str(tmp_path / "old"))
    saver_of(old, GRPO)[0].save(7, Progress())
    path = [f"trainer.resume_from_path={old.step_folder(7)}"] if mode == "resume_path" else []
    command = [GRPO, f"trainer.resume_mode={mode}", f"trainer.resume_weights_only={weights_only}", *path]
    saver, cfg = saver_of(folder, *command)
    begun = find_resume_point(cfg, folder, None)
    assert begun.folder == (old.step_folder(7) if path else None)
    first = begun.step + 1
    for step in (first, first + 1, first + 2):
        saver.save(step, Progress(batches_drawn=step))
    (folder.step_folder(first + 2) / "sampler.npz").unlink()
    caplog.set_level(logging.INFO)
    start = find_resume_point(cfg, folder, None)
    assert (start.step, start.folder, start.weights_only) == (first + 1, folder.step_folder(first + 1), False)
    assert start.progress.batches_drawn == first + 1
    assert f"by the same command (trainer.resume_mode={mode})" in caplog.text
    # Another start than the one of the run is refused, as before.
    saver_of(old, GRPO)[0].save(8, Progress())
    other = [GRPO, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={old.step_folder(8)}"]
    # The key that decides the folder is named: where it is set, another name of the experiment changes nothing.
    with pytest.raises(
        CheckpointError, match=r"already holds a checkpoint of step.*another trainer\.default_local_dir"
    ):
        find_resume_point(saver_of(folder, *other, "trainer.resume_weights_only=True")[1], folder, None)
    old.release()


def test_a_step_is_of_its_run_however_its_path_is_written(folder, monkeypatch):
    saver_of(folder, GRPO)[0].save(4, Progress())
    monkeypatch.chdir(folder.path.parent)
    monkeypatch.setenv("HOME", str(folder.path.parent))
    for name in ("run/global_step_4", "./run/../run/global_step_4/", "~/run/global_step_4"):
        words = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={name}")
        start = find_resume_point(saver_of(folder, GRPO, *words)[1], folder, None)
        # Else the metrics of its four steps would be moved aside as another run's.
        assert start.is_of(folder.path)
        assert start.folder == folder.step_folder(4)


def test_what_workers_distrust_is_passed_over_and_replaced(folder, caplog):
    """Workers read the large files; the next selection and the next save use their results."""
    saver, cfg = saver_of(folder, GRPO)
    for step in (1, 2):
        saver.save(step, Progress())
    large = folder.step_folder(2) / "large.bin"
    large.write_bytes(bytes(5 * 2**20))
    rewrite_manifest(folder.step_folder(2), lambda files: files.update({"large.bin": {"bytes": 5 * 2**20}}))
    add_digests(folder.step_folder(2))
    asked = []

    def ask(function, shares):
        asked.extend(shares)
        return SimpleNamespace(collect=lambda: [function(share) for share in shares])

    group, find = SimpleNamespace(world=2, ask=ask), partial(find_resume_point, cfg, folder, None)
    assert verified(find(), group, folder, find).step == 2
    assert [[file.name for file, _ in share] for share in asked] == [["large.bin"], []]
    flip(large, 12345)
    assert find().step == 2
    assert verified(find(), group, folder, find).step == 1
    assert "large.bin have changed since it was saved" in caplog.text
    saver.save(2, Progress())
    assert len(list(folder.path.glob("damaged_global_step_2_*"))) == 1
    assert find().step == 2, "what has taken its place is trusted"


# -- settings ----------------------------------------------------------------------------------------------------------


def started(folder: RunFolder, *settings: str) -> None:
    write_config(folder, load_config(settings))


def test_a_resumed_run_logs_changes_and_keeps_old_settings(folder, caplog):
    caplog.set_level(logging.INFO)
    name = "trainer.experiment_name=mine"
    started(folder, name, GRPO)
    started(folder, name, GRPO)  # nothing new to keep
    again = load_config([name, "algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.optim.lr=1e-4"])
    log_changes(again, ResumePoint(3, folder=folder.path / "global_step_3"))
    assert "  actor_rollout_ref.actor.optim.lr: 1e-06 -> 0.0001\n" in caplog.text + "\n"
    assert caplog.text.count(" -> ") == 3  # and the estimator, once more in the warning
    assert "the 3 steps so far are of another experiment" in caplog.text
    write_config(folder, again)
    started(folder, name)
    kept = [(folder.path / f"config.{number}.yaml").read_text() for number in (1, 2)]
    assert ["adv_estimator: grpo" in kept[0], "adv_estimator: rloo" in kept[1]] == [True, True]
    assert not (folder.path / "config.3.yaml").exists()


def test_a_finished_run_says_where_it_is_and_what_differs(folder, caplog):
    caplog.set_level(logging.INFO)
    started(folder, "trainer.experiment_name=mine", "data.seed=3", "trainer.logger=[console]")
    start = ResumePoint(3, folder=folder.path / "global_step_3")
    changes = log_changes(load_config(["trainer.experiment_name=mine"]), start)
    assert changes == ["data.seed: 3 -> 1"]
    log_finished(folder.path, 3, changes)
    assert "nothing left to do: the run has its 3 steps" in caplog.text
    assert "other settings than those of this command (data.seed: 3 -> 1). To start a new run" in caplog.text


def test_another_experiment_needs_a_name_to_resume(folder):
    started(folder, GRPO)
    start, rloo = ResumePoint(2, folder=folder.path / "global_step_2"), "algorithm.adv_estimator=rloo"
    with pytest.raises(ConfigError, match=r"algorithm.adv_estimator: grpo -> rloo.*trainer.experiment_name="):
        log_changes(load_config([rloo]), start)
    with pytest.raises(ConfigError, match="clip_ratio_high"):
        log_changes(load_config([GRPO, "actor_rollout_ref.actor.clip_ratio_high=0.3"]), start)
    log_changes(load_config([GRPO, "actor_rollout_ref.actor.optim.lr=1e-5"]), start)
    log_changes(load_config([rloo, "trainer.experiment_name=run"]), start)
    of_weights = ResumePoint(folder=start.folder, weights_only=True)
    log_changes(load_config([rloo, "trainer.resume_weights_only=True"]), of_weights)
    # A default that earlier versions wrote out is no other experiment.
    started(folder, "actor_rollout_ref.actor.loss_agg_mode=token-mean")
    log_changes(load_config([]), start)
