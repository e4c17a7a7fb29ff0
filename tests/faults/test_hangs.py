"""Hangs of a worker, of storage under a worker, and of the driver. Every hang ends with exit code 75 and saves its
stacks."""

import os
import re
import signal

import pytest

from tests.faults.plug import Trap, below, ended, error_of, over, wait_for_step, worker_pids
from tests.tiny import small_run

# Calls of these runs take a second; on a machine that is three times as slow, a little more.
LIMIT_S = 30
# vLLM's start is one call, which took more than 60 s on a machine with other load.
VLLM_LIMIT_S = 150
CALLBACK = """
import pathlib
def on_step(step, metrics):
    if step == 2:
        pathlib.Path({fifo!r}).read_text()  # as storage does that does not answer
"""


@pytest.fixture
def command(tiny_model, arithmetic_files, tmp_path):
    """The arguments of a run whose calls have the deadline LIMIT_S."""
    always = {"trainer__total_training_steps": 100000, "trainer__hang_timeout_s": LIMIT_S, "trainer__save_freq": -1}
    return lambda **changes: small_run(tiny_model, arithmetic_files, tmp_path / "run", **always | changes)


def hung(process, started) -> str:
    """Return the output of the command after it and all its processes have ended, with exit code 75."""
    output = over(process, 75)
    ended(started)
    # No setting of these runs saves, and half an hour has not passed.
    assert "continues" not in output
    assert ("Nothing is saved yet: the same command starts over" in output) == ("starting Ray" in output)
    return error_of(output)


@pytest.mark.long
@pytest.mark.usefixtures("own_ray")
@pytest.mark.fault("A worker that is stopped is named with its phase, and the stacks of workers and scorers are kept")
def test_a_stopped_worker_ends_the_run_and_stacks_are_kept(start, command, tmp_path):
    process = start(command(trainer__n_gpus_per_node=2))
    wait_for_step(tmp_path / "run", 1, process)
    started, victim = below(process.pid), worker_pids(process.pid)[1]
    os.kill(victim, signal.SIGSTOP)
    message = hung(process, started)
    assert re.search(
        rf"rank \d of 2 \(pid {victim} on .*\), in [\w.]+: not done after \d+ s \(and not responding", message
    )
    assert f"trainer.hang_timeout_s={LIMIT_S}" in message
    (file,) = (tmp_path / "run" / "incidents").glob("hang_*.txt")
    assert str(file) in message
    stacks = file.read_text()
    assert "runtime/slots/child.py" in stacks  # the process was started by a reward worker
    assert re.search(r"hybrid worker, rank \d of 2", stacks)


VLLM = {"actor_rollout_ref__rollout__name": "vllm", "trainer__hang_timeout_s": VLLM_LIMIT_S}


@pytest.mark.long
@pytest.mark.usefixtures("own_ray")
@pytest.mark.fault("A worker that stops while it loads, syncs or generates with vLLM is named, exit 75")
@pytest.mark.parametrize(
    ("phase", "changes", "call", "seen"),
    [
        ("load", {}, "Models.init_models", ""),
        ("sync", {"trainer__n_gpus_per_node": 2}, "Rollout.generate", "weight_sync.py"),
        # Over two workers, one of which waits for the other within a kernel of vLLM.
        (
            "vllm_generate",
            {"trainer__n_gpus_per_node": 2, "actor_rollout_ref__rollout__tensor_model_parallel_size": 2, **VLLM},
            "Rollout.generate",
            "vllm/engine.py",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value in (*Trap.PHASES, *Trap.ENGINE) else "",
)
def test_a_worker_that_stops_in_a_phase_is_told(start, command, trap, tmp_path, phase, changes, call, seen):
    trap.lay(phase, signal.SIGSTOP)
    process = start(command(**changes), **trap.environment)
    trap.wait(process)
    started, world = below(process.pid), changes.get("trainer__n_gpus_per_node", 1)
    message = hung(process, started)
    assert re.search(rf"rank \d of {world} \(pid {trap.caught} on .*\), in {call}: not done after", message), message
    assert "and not responding" in message
    (file,) = (tmp_path / "run" / "incidents").glob("hang_*.txt")
    assert "runtime/slots/child.py" in file.read_text()
    assert seen in file.read_text()


@pytest.mark.long
@pytest.mark.usefixtures("own_ray")
@pytest.mark.fault("An engine whose own process stops while it starts ends the run, and that process is told and ended")
def test_an_engine_that_never_starts_is_told(start, command, trap, tmp_path):
    trap.lay("vllm_start", signal.SIGSTOP)
    process = start(command(**VLLM), **trap.environment, VLLM_CACHE_ROOT=str(tmp_path / "vllm"))
    trap.wait(process)
    started = below(process.pid)
    message = hung(process, started)
    late = r"rank 0 of 1 \(pid \d+ on .*\), in Models.init_models: not done after .*but responding"
    assert re.search(late, message), message
    (file,) = (tmp_path / "run" / "incidents").glob("hang_*.txt")
    assert re.search(rf"process {trap.caught} \(.*registry.*\) is stopped by a signal", file.read_text())
    assert "_run_in_subprocess" in file.read_text()  # the function in which the worker waits


@pytest.mark.long
@pytest.mark.usefixtures("own_ray")
@pytest.mark.fault("A driver that hangs, in storage or a callback, is told with the line that it hangs in, exit 75")
def test_a_driver_that_hangs_ends_itself(start, command, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "callback.py").write_text(CALLBACK.format(fifo=str(tmp_path / "fifo")))
    process = start(command(trainer__callbacks=f"[{tmp_path}/callback.py:on_step]"))
    wait_for_step(tmp_path / "run", 1, process)
    started = below(process.pid)
    message = hung(process, started)
    assert re.match(rf"error: the driver \(pid {process.pid} on .*\) hangs: for \d+ s", message)
    assert "callbacks/user.py" in message
    (file,) = (tmp_path / "run" / "incidents").glob("hang_driver_*.txt")
    assert "callback.py" in file.read_text()
    assert "reward worker 0" in file.read_text()


@pytest.mark.long
@pytest.mark.fault("Storage that hangs before Ray starts is told with the line that waits for it, exit 75")
def test_a_driver_that_hangs_before_ray_ends_itself(start, command, tmp_path):
    os.mkfifo(tmp_path / "template")
    template = {"actor_rollout_ref__model__custom_chat_template": tmp_path / "template"}
    process = start(command(**template, trainer__hang_timeout_s=5), whole=True)
    message = hung(process, {})
    assert re.match(r"error: the driver \(pid \d+ on .*\) hangs: for \d s it has been in open", message)
    assert " in template_text (" in message
    (file,) = (tmp_path / "run" / "incidents").glob("hang_driver_*.txt")
    assert str(file) in message
