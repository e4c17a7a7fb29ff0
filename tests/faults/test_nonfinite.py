"""A non-finite loss ends the run before the optimizer step, and the mini-batch is saved."""

import pytest
import torch

from rltrain.main_ppo import main
from tests.tiny import small_run


# The kept mini-batch is loaded in tests/workers/test_incidents.py.
@pytest.mark.long
@pytest.mark.fault("A loss that is not finite makes no optimizer step, exit 70, and its mini-batch is kept")
@pytest.mark.usefixtures("joined")
def test_a_non_finite_loss_ends_the_run_and_is_kept(tiny_model, arithmetic_files, tmp_path, capsys):
    """The first of two optimizer steps makes the weights so large that no loss is finite."""
    run = tmp_path / "run"
    far = {"actor_rollout_ref__actor__optim__lr": 1e30, "trainer__n_gpus_per_node": 2}
    assert main(small_run(tiny_model, arithmetic_files, run, **far)) == 70
    (folder,) = (run / "incidents").iterdir()
    said = capsys.readouterr().err
    assert "no optimizer step was made" in said
    assert f"It is kept in {folder} (docs/recovery.md" in said
    assert not list(run.glob("global_step_*"))
    assert sorted(file.name for file in folder.iterdir()) == ["config.yaml", "rank_0.pt", "rank_1.pt", "weights"]
    samples = [torch.load(folder / f"rank_{rank}.pt", weights_only=True)["samples"] for rank in (0, 1)]
    assert sum(map(len, samples)) == 8
