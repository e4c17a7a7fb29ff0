"""A loss that is not finite: the run ends before it learns from it, and keeps the mini-batch."""

import pytest
import torch

from rltrain.main_ppo import main
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


# The kept mini-batch is loaded in tests/workers/test_incidents.py.
@pytest.mark.long
@pytest.mark.fault("A loss that is not finite makes no optimizer step, exit 70, and its mini-batch is kept")
@pytest.mark.usefixtures("joined")
def test_a_non_finite_loss_ends_the_run_and_is_kept(kind, tmp_path, capsys):
    """The first of two optimizer steps throws the weights far away, where no loss is finite."""
    run, (model, files, changes) = tmp_path / "run", kind
    far = {"actor_rollout_ref__actor__optim__lr": 1e30, "trainer__n_gpus_per_node": 2}
    assert main(small_run(model, files, run, **changes, **far)) == 70
    (folder,) = (run / "incidents").iterdir()
    said = capsys.readouterr().err
    assert "no optimizer step was made" in said
    assert f"It is kept in {folder} (docs/recovery.md" in said
    assert not list(run.glob("global_step_*"))
    assert sorted(file.name for file in folder.iterdir()) == ["config.yaml", "rank_0.pt", "rank_1.pt", "weights"]
    samples = [torch.load(folder / f"rank_{rank}.pt", weights_only=True)["samples"] for rank in (0, 1)]
    assert sum(map(len, samples)) == 8
