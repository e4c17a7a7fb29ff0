"""A run whose disk fills up while it trains, on a file system of 8 MB."""

import re
import shutil

import pytest

from rltrain.report import read_metrics
from rltrain.trainer.checkpoint import find_damage
from tests.faults.plug import PATIENCE_S, gone, wait_for_step
from tests.tiny import small_run


@pytest.mark.long
@pytest.mark.fault("A disk that fills up during a run: exit 74 with the free space, and the same command goes on")
@pytest.mark.usefixtures("joined")
def test_a_disk_that_fills_up_in_a_run_costs_no_checkpoint(start, tiny_model, arithmetic_files, tmp_path, small_disk):
    run = small_disk / "run"
    changes = {"trainer__save_freq": 2, "trainer__max_actor_ckpt_to_keep": 2, "trainer__total_training_steps": 100000}
    args = small_run(tiny_model, arithmetic_files, run, **changes)
    process = start(args)
    wait_for_step(run, 4, process)
    with open(small_disk / "of_others", "wb", buffering=0) as file:
        try:
            while file.write(bytes(65536)):
                pass
        except OSError:
            pass
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 74, output
    said = output[output.index("error: ") :]
    assert re.search(
        r"checkpoint of step \d+.* has [\d.]+ (bytes|KiB) free and a checkpoint takes about [\d.]+ KiB", said
    )
    assert "Traceback" not in output
    saved = [int(folder.name.rpartition("_")[2]) for folder in run.glob("global_step_*")]
    assert not [find_damage(run / f"global_step_{step}") for step in saved if find_damage(run / f"global_step_{step}")]
    (small_disk / "of_others").unlink()
    again = start([*args, f"trainer.total_training_steps={max(saved) + 2}"])
    output, _ = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, output
    assert [line["step"] for line in read_metrics(run)] == list(range(1, max(saved) + 3))
    assert shutil.disk_usage(small_disk).free > 2**20
    assert gone(tmp_path)
