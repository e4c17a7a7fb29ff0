"""A loss that is not finite: the run ends before it learns from it, and what it keeps computes the same again."""

import shutil

import pytest

from rltrain.main_ppo import main
from rltrain.tools import replay
from tests.faults.test_resume import NUM_ROWS, PICTURES
from tests.tiny import small_run
from tests.tiny_vision import save_tiny_vision_model, write_pictures


@pytest.fixture(params=["text", "pictures and adapters"])
def kind(request, tiny_model, arithmetic_files, tmp_path):
    """Model, files and keys of a run."""
    if request.param == "text":
        return tiny_model, arithmetic_files, {}
    pytest.importorskip("torchvision", reason="torchvision is not installed (scripts/test.sh installs it)")
    save_tiny_vision_model(tmp_path / "model", "qwen2_5_vl", tied=False)
    files = [write_pictures(tmp_path / f"{split}.parquet", range(NUM_ROWS)) for split in ("train", "test")]
    return tmp_path / "model", files, PICTURES


# What is kept and computed again, without a run: tests/workers/test_incidents.py.
@pytest.mark.long
@pytest.mark.fault("A loss that is not finite makes no optimizer step, exit 70, and is computed again on one device")
@pytest.mark.usefixtures("joined")
def test_a_non_finite_loss_ends_the_run_and_is_replayed(kind, tmp_path, capsys):
    """The first of two optimizer steps throws the weights far away, where no loss is finite."""
    run, (model, files, changes) = tmp_path / "run", kind
    far = {"actor_rollout_ref__actor__optim__lr": 1e30, "trainer__n_gpus_per_node": 2}
    assert main(small_run(model, files, run, **changes, **far)) == 70
    (folder,) = (run / "incidents").iterdir()
    said = capsys.readouterr().err
    assert "no optimizer step was made" in said
    assert f"python -m rltrain.replay {folder}" in said
    assert not list(run.glob("global_step_*"))
    assert sorted(file.name for file in folder.iterdir()) == ["config.yaml", "rank_0.pt", "rank_1.pt", "weights"]
    assert replay.main([str(folder)]) == 70
    said = capsys.readouterr().out
    assert said.startswith("actor: 8 samples in ")
    assert "of 2 ranks, with the weights of the incident\nloss " in said
    assert "gradient norm nan: NOT finite" in said
    assert "not finite by itself: 8 of 8 samples (rank/place: 0/0, " in said
    # The samples themselves are sound: with the weights of the model's folder all is finite.
    shutil.rmtree(folder / "weights")
    assert replay.main([str(folder)]) == 0
    assert "finite here" in capsys.readouterr().out
    (folder / "rank_1.pt").unlink()
    assert replay.main([str(folder)]) == 2
    assert "holds 1 of 2 rank_N.pt" in capsys.readouterr().err
