"""Kills of the command as a user starts it, in a separate process."""

import os
import re
import signal

import pytest

from rltrain.common.clock import SYSTEM
from rltrain.common.stop import ONE_REQUEST_S
from rltrain.run.checkpoints.manifest import find_damage
from rltrain.run.report.table import read_metrics
from tests.clock import PATIENCE_S, eventually
from tests.faults.plug import (
    below,
    ended,
    error_of,
    gone,
    over,
    pids,
    wait_for_line,
    wait_for_step,
    wait_while_running,
    worker_pids,
)
from tests.tiny import small_run


# The message about a killed worker is tested without a run in tests/runtime/test_group.py.
@pytest.mark.long
@pytest.mark.fault("A killed worker is named within seconds, exit 75; the same command resumes")
@pytest.mark.usefixtures("own_ray")
def test_after_a_killed_worker_the_same_command_goes_on(start, tiny_model, arithmetic_files, tmp_path):
    args = small_run(tiny_model, arithmetic_files, tmp_path, trainer__total_training_steps=100000, trainer__save_freq=2)
    process = start(args)
    wait_for_step(tmp_path, 3, process)
    # Steps are faster than the checkpoint that is written meanwhile, and a kill loses an incomplete one.
    eventually(lambda: list(tmp_path.glob("global_step_*")))
    victim = worker_pids(process.pid)[0]
    os.kill(victim, signal.SIGKILL)
    output = over(process, 75)
    message = error_of(output)
    assert re.search(rf"rank 0 of 1 \(pid {victim} on .*the process died", message)
    assert "Run the same command again" in message
    assert re.search(r"\n +Step \d+ of 100000 is saved: the same command resumes after it", message)
    said = (tmp_path / "train.log").read_text()
    assert said.index("starting Ray") < said.index("loading") < said.index("step 3/") < said.index("the process died")
    assert re.search(r"Ray's logs: \S+ on every node", message)
    assert f"rank 0: pid {victim}" in (tmp_path / "logs" / "rank_00000.log").read_text()
    saved = max(int(folder.name.rpartition("_")[2]) for folder in tmp_path.glob("global_step_*"))
    again = start([*args, f"trainer.total_training_steps={saved + 1}"])
    output = over(again)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, saved + 2))


@pytest.mark.fault("SIGTERM finishes the step, saves and exits 75")
@pytest.mark.usefixtures("joined")
def test_sigterm_finishes_the_step_saves_and_exits_75(start, tiny_model, arithmetic_files, tmp_path):
    process = start(small_run(tiny_model, arithmetic_files, tmp_path, trainer__total_training_steps=100000))
    wait_for_step(tmp_path, 2, process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # as `timeout` does: to the process, and to its group
    output = over(process, 75)
    last = read_metrics(tmp_path)[-1]["step"]
    assert output.splitlines()[-1] == f"stopped after step {last} of 100000; the same command resumes"
    assert "exported model" not in output
    assert [folder.name for folder in tmp_path.glob("global_step_*")] == [f"global_step_{last}"]
    assert (tmp_path / "samples" / f"train_{last:06d}.parquet").is_file()


# Responses to the prompts ``slow`` wait until the file `go` exists; with ``later``, from the second step on.
WAITING_REWARD = """
import pathlib
def compute_score(data_source, solution_str, ground_truth, extra_info, folder, slow, later=False):
    folder = pathlib.Path(folder)
    lines = folder / "run" / "metrics.jsonl"
    while extra_info["index"] in slow and solution_str != ground_truth and not (folder / "go").exists():
        if later and not (lines.exists() and lines.read_text()):
            break
        (folder / "waits").touch()
    return 1.0
"""


@pytest.fixture
def waiting(start, tiny_model, arithmetic_files, tmp_path):
    """waiting(steps, slow, **more): return the arguments of a run, and its process, which waits for a response."""

    def run(steps, slow, later=False, **more):
        (tmp_path / "reward.py").write_text(WAITING_REWARD)
        of_function = "custom_reward_function__reward_kwargs__"
        keys = {"custom_reward_function__path": tmp_path / "reward.py", of_function + "folder": tmp_path}
        keys |= {of_function + "slow": [*slow], of_function + "later": later, "reward__timeout_s": 10 * PATIENCE_S}
        words = small_run(
            tiny_model, arithmetic_files, tmp_path / "run", trainer__total_training_steps=steps, **keys, **more
        )
        process = start(words)
        wait_while_running(process, (tmp_path / "waits").exists, "a waiting answer")
        process.send_signal(signal.SIGINT)
        return words, process

    return run


@pytest.mark.long
@pytest.mark.fault("A second Ctrl-C, and one outside of a step, stop at once: 130")
@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("when", ["in_a_step", "in_the_first_validation"])
def test_ctrl_c_stops_at_once_outside_steps_or_when_repeated(waiting, tmp_path, when):
    _, process = waiting(6, range(24) if when == "in_a_step" else range(24, 30), trainer__val_before_train=True)
    if when == "in_a_step":
        wait_for_line(process, "finishing this step, saving, then stopping (again: stop at once)")
        SYSTEM.sleep(2 * ONE_REQUEST_S)  # two signals at once are one request
        process.send_signal(signal.SIGINT)
    output = over(process, 130)  # although a response waits
    assert output.splitlines()[-1] == "stopped after step 0 of 6; nothing is saved yet, so the same command starts over"
    assert not list(tmp_path.glob("run/global_step_*"))


@pytest.mark.long
@pytest.mark.fault("One Ctrl-C in a step finishes and saves it, exit 130; the same command resumes")
@pytest.mark.usefixtures("joined")
def test_one_ctrl_c_finishes_the_step_and_saves(start, waiting, tmp_path):
    words, process = waiting(3, range(24), later=True)
    wait_for_line(process, "SIGINT: finishing this step, saving, then stopping (again: stop at once)")
    (tmp_path / "go").touch()
    run, output = tmp_path / "run", over(process, 130)
    assert output.splitlines()[-1] == "stopped after step 2 of 3; the same command resumes"
    assert [line["step"] for line in read_metrics(run)] == [1, 2]
    assert [folder.name for folder in run.glob("global_step_*")] == ["global_step_2"]
    assert not find_damage(run / "global_step_2")
    over(start(words))
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3]


@pytest.mark.long
@pytest.mark.fault("SIGTERM while a checkpoint is written leaves that checkpoint whole, exit 75")
@pytest.mark.usefixtures("own_ray")
@pytest.mark.parametrize("beside", [True, False], ids=["beside_a_step", "waited_for"])
def test_sigterm_while_a_checkpoint_is_written(start, tiny_model, arithmetic_files, trap, tmp_path, beside):
    run = tmp_path / "run"
    trap.lay("save", signal.SIGSTOP)  # in the middle of its file, until the signal has arrived
    process = start(
        small_run(
            tiny_model, arithmetic_files, run, trainer__total_training_steps=100000, trainer__save_freq=1,
            trainer__async_save=beside,
        ),
        **trap.environment,
    )  # fmt: skip
    trap.wait(process)
    eventually(lambda: list(run.glob(".tmp_global_step_1_*")))
    assert not list(run.glob("global_step_*"))
    if beside:
        wait_for_line(process, "step 1/")
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, "SIGTERM: finishing this step, saving, then stopping")
    os.kill(int(trap.caught), signal.SIGCONT)
    output = over(process, 75)
    last = read_metrics(run)[-1]["step"]
    assert last in ((1, 2) if beside else (1,)), "the next one may have begun"
    assert output.splitlines()[-1] == f"stopped after step {last} of 100000; the same command resumes"
    saved = sorted(run.glob("global_step_*"))
    assert [folder.name for folder in saved] == [f"global_step_{step}" for step in range(1, last + 1)]
    assert not any(map(find_damage, saved))
    assert not list(run.glob(".tmp_*"))
    gone(tmp_path)


@pytest.mark.long
@pytest.mark.fault("SIGTERM while Ray starts leaves no process, exit 75")
@pytest.mark.usefixtures("own_ray")
def test_sigterm_while_ray_starts_says_so_and_leaves_no_process(start, tiny_model, arithmetic_files, tmp_path):
    process = start(small_run(tiny_model, arithmetic_files, tmp_path), whole=True)
    wait_for_line(process, f"in {tmp_path}")  # the last line of the plan; Ray comes next
    eventually(lambda: pids(process.pid, "gcs_server"))
    process.send_signal(signal.SIGTERM)
    output = over(process, 75)
    assert output.splitlines()[-1] == "stopped after step 0 of 2; nothing is saved yet, so the same command starts over"
    gone(tmp_path)


@pytest.mark.long
@pytest.mark.fault("kill -9 of the driver leaves no process and frees the folder; the same command resumes")
@pytest.mark.usefixtures("own_ray")
def test_kill_nine_of_the_driver_frees_the_folder(start, tiny_model, arithmetic_files, tmp_path):
    args = small_run(tiny_model, arithmetic_files, tmp_path, trainer__total_training_steps=100000, trainer__save_freq=1)
    process = start(args)
    wait_for_step(tmp_path, 2, process)
    # Ray's name for a process between its start and the actor that it is for.
    eventually(lambda: "ray::IDLE" not in below(process.pid).values(), "no process is idle")
    started = below(process.pid)
    process.kill()
    process.communicate()
    ended(started)
    again = start([*args, "trainer.total_training_steps=2"])
    over(again)


@pytest.mark.fault("A broken row of the data is named before a worker starts, exit 2")
def test_a_broken_row_is_named_before_any_worker_starts(start, tiny_model, arithmetic_files, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(arithmetic_files[0]).to_pylist()
    table[5]["prompt"] = None
    broken = tmp_path / "broken.parquet"
    pq.write_table(pa.Table.from_pylist(table), broken)
    process = start(small_run(tiny_model, (broken, arithmetic_files[1]), tmp_path / "run"))
    output = over(process, 2)
    assert "broken.parquet" in output
    assert re.search(r"row 5\b", output)
    assert "prompt" in output
    assert "starting Ray" not in output
