"""Operations on checkpoints: export, thin, verify."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rltrain.common.errors import CheckpointError, DiskError
from rltrain.common.storage import write_json
from rltrain.config.load import load_config
from rltrain.models.files.safe import SafeReader, read_metadata
from rltrain.run.checkpoints import thin as thinning
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.manifest import checkpoint_digest, find_damage, is_thinned
from rltrain.run.checkpoints.resume import find_resume_point
from rltrain.tools.checkpoint import main
from rltrain.tools.evaluate.results import RESULT
from tests.local import local_trainer
from tests.tiny import small_run
from tests.trainer.test_saving import saver_of

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_model, arithmetic_files) -> Path:
    """A run with a critic and two checkpoints, the second after one step."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    words = small_run(tiny_model, arithmetic_files, folder, algorithm__adv_estimator="gae")
    trainer, run = local_trainer(words), RunFolder(str(folder))
    saver = saver_of(trainer, run)
    for step in (1, 2, 3):
        trainer.step(step)
        saver.save(step, trainer.progress)
        saver.finish()
    run.release()
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all of a role's shards by name."""
    described = read_metadata(folder).state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in described.items()}
    dcp.load(state, storage_reader=SafeReader(folder))
    return state


def test_a_thinned_checkpoint_has_its_weights_and_no_optimizer(run, saved, capsys):
    assert main(["thin", str(run), "--dry-run"]) == 0
    assert "would free" in capsys.readouterr().out.splitlines()[-1]
    assert not is_thinned(run / "global_step_1")
    assert main(["thin", str(run)]) == 0
    said = capsys.readouterr().out
    assert "global_step_3" in said
    assert "stays (--keep)" in said
    for role in ("actor", "critic"):
        before, after = (tensors(folder / "global_step_1" / role) for folder in (saved, run))
        assert after.keys() == {name for name in before if name.startswith("model.")} < before.keys()
        assert all(torch.equal(before[name], weight) for name, weight in after.items())
    sizes = [
        sum(file.stat().st_size for file in (folder / "global_step_1" / "actor").iterdir()) for folder in (saved, run)
    ]
    assert sizes[1] < 0.5 * sizes[0]
    assert thinning.damage(run / "global_step_1") is None
    # By which an evaluation that was made before finds its answers again.
    digests = [checkpoint_digest(folder / "global_step_1") for folder in (saved, run)]
    assert digests[0] == digests[1] != checkpoint_digest(run / "global_step_2")
    exported = "global_step_1/huggingface/model.safetensors"
    assert (run / exported).read_bytes() == (saved / exported).read_bytes()
    assert tensors(run / "global_step_3" / "actor").keys() == tensors(saved / "global_step_3" / "actor").keys()
    assert main(["thin", str(run)]) == 0
    assert "freed 0 bytes in all" in capsys.readouterr().out


def test_the_newest_and_the_best_stay_until_they_are_named(run, capsys):
    (run / "config.yaml").write_text("trainer:\n  keep_best: val-core/x/acc/mean@1\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "val-core/x/acc/mean@1": 1.0}) + "\n")
    assert main(["thin", str(run), "--keep", "4"]) == 0
    assert not any(is_thinned(run / f"global_step_{step}") for step in (1, 2, 3))
    assert main(["thin", str(run)]) == 0
    assert [is_thinned(run / f"global_step_{step}") for step in (1, 2, 3)] == [False, True, False]
    assert main(["thin", str(run), "--keep", "0", "--best"]) == 0
    assert all(is_thinned(run / f"global_step_{step}") for step in (1, 2, 3))


@pytest.mark.parametrize("moment", ["committing", "between"])
def test_a_checkpoint_stays_where_thinning_is_cut_short(run, monkeypatch, moment):
    """The interruption is an error, or a kill between the two renames."""

    def fail(*arguments, **keys):
        raise DiskError("full")

    if moment == "between":
        (run / "global_step_1").rename(run / "replaced_global_step_1")
    else:
        monkeypatch.setattr(RunFolder, "name_it", fail)
        assert main(["thin", str(run)]) == 74
    again = RunFolder(str(run))
    again.release()
    assert again.steps() == [1, 2, 3]
    assert not [*run.glob(".tmp_*"), *run.glob("replaced_*")]
    assert find_damage(run / "global_step_1") is None
    assert not is_thinned(run / "global_step_1")


def test_no_run_goes_on_from_a_thinned_checkpoint_but_one_starts_from_its_weights(run):
    assert main(["thin", str(run), "--keep", "0"]) == 0
    folder = RunFolder(str(run))
    with pytest.raises(CheckpointError, match=r"no optimizer state.*another trainer\.default_local_dir: .*only=True"):
        find_resume_point(load_config([]).config, folder, None)
    keys = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={run / 'global_step_3'}"]
    fresh = RunFolder(str(run.with_name("fresh")))
    start = find_resume_point(load_config([*keys, "trainer.resume_weights_only=True"]).config, fresh, None)
    assert start.weights_only
    assert start.folder == run / "global_step_3"
    for held in (folder, fresh):
        held.release()


def test_a_run_that_is_on_is_not_thinned(run, capsys):
    held = RunFolder(str(run))
    assert main(["thin", str(run)]) == 2
    assert "is in use by" in capsys.readouterr().err
    held.release()


def test_verify_names_what_is_damaged(run, capsys):
    assert main(["verify", str(run)]) == 0
    file = run / "global_step_2" / "huggingface" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert main(["verify", str(run)]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith(f"error: damaged in {run}: global_step_2.")
    assert said.out.count("whole") == 5
    assert "huggingface/model.safetensors have changed" in said.out
    assert main(["verify", str(run / "global_step_1")]) == 0


def test_an_export_is_the_model_folder_of_the_step(run, tmp_path, capsys):
    assert main(["export", str(run / "global_step_1"), str(tmp_path / "one")]) == 0
    assert main(["export", str(run), str(tmp_path / "newest")]) == 0
    for step, out in ((1, "one"), (3, "newest")):
        source = run / f"global_step_{step}" / "huggingface"
        assert {file.name: file.read_bytes() for file in source.iterdir()} == {
            file.name: file.read_bytes() for file in (tmp_path / out).iterdir()
        }
    assert main(["export", str(run), str(tmp_path / "one")]) == 2
    assert "already exists" in capsys.readouterr().err


def test_the_card_of_an_export_has_the_scores_before_and_after(run, tmp_path, capsys):
    lines = [{"step": step, "val-core/a/acc/mean@4": 0.1 * step, "val-aux/x": 1.0} for step in range(4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 2, "x": 1.0}]))
    assert main(["export", str(run / "global_step_2"), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    table = "| validation | step 0 | step 2 |\n| --- | --- | --- |\n| val-core/a/acc/mean@4 | 0 | 0.2 |\n"
    assert card == (run / "global_step_2/huggingface/README.md").read_text() + f"\n## Scores\n\n{table}"
    assert f"hf upload USER/NAME {tmp_path / 'out'}" in capsys.readouterr().out
    assert find_damage(run / "global_step_2") is None


@pytest.mark.parametrize("program", ["thin", "verify", "export"])
def test_a_folder_without_checkpoints_is_refused(program, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    write_json(tmp_path / "run" / "global_step_4" / RESULT, {})
    refusals = [("empty", "empty has no checkpoint"), ("none", "none is not a folder")]
    if program != "export":
        refusals += [("run", "global_step_4 has an evaluation of a checkpoint, but no weights")]
    for name, said in refusals:
        words = [program, str(tmp_path / name), *([str(tmp_path / "out")] if program == "export" else [])]
        assert main(words) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
