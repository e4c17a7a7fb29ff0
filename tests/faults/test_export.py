"""A worker is killed while it writes the model that others load: half of it is nowhere a model."""

import re
import signal

import pytest

from rltrain.models.files.source import model_problem
from rltrain.run.checkpoints.manifest import find_damage
from rltrain.run.report.table import read_metrics
from tests.faults.plug import wait_for_step, wait_until
from tests.tiny import small_run


@pytest.mark.long
@pytest.mark.usefixtures("own_ray")
@pytest.mark.fault("A worker killed in an export leaves no half of a model, exit 75; the same command goes on")
def test_a_worker_killed_in_an_export_leaves_no_half_of_a_model(start, trap, tiny_model, arithmetic_files, tmp_path):
    run = tmp_path / "run"
    always = {"trainer__save_freq": 1, "trainer__total_training_steps": 100000}
    words = small_run(tiny_model, arithmetic_files, run, **always)
    process = start(words, **trap.environment)
    wait_for_step(run, 2, process)
    (tmp_path / "laid").write_text(f"models/weights/export.py write {int(signal.SIGKILL)}")
    (tmp_path / "laid").rename(tmp_path / "trap")
    assert wait_until(lambda: trap.caught or process.poll() is not None)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 75, output
    assert re.search(rf"error: hybrid worker, rank 0 of 1 \(pid {trap.caught} on .*: the process died", output)
    saved = {int(folder.name.rpartition("_")[2]): folder for folder in run.glob("global_step_*")}
    for folder in saved.values():
        assert not find_damage(folder)
        assert not model_problem("model.path", str(folder / "huggingface"))
    # What the kill has left has not the name of a checkpoint, and the next start removes it.
    assert list(run.glob(".tmp_global_step_*"))
    again = start([*words, f"trainer.total_training_steps={max(saved) + 1}"])
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert f"exported model: {run}/global_step_{max(saved) + 1}/huggingface" in output
    assert not list(run.glob(".tmp_*"))
    assert [line["step"] for line in read_metrics(run)] == list(range(1, max(saved) + 2))
