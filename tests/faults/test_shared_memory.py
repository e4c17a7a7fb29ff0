"""Shared memory of an engine over two processes: whichever process is killed, at the start or later, none is left."""

import os
import re
import signal
import threading

import pytest

from tests.clock import eventually
from tests.faults.plug import below, ended, gone, over, wait_while_running
from tests.tiny import small_run

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("own_ray")]


@pytest.fixture
def words(tiny_model, arithmetic_files, tmp_path):
    changes = {
        "actor_rollout_ref__rollout__name": "vllm", "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
        "trainer__n_gpus_per_node": 2, "trainer__save_freq": -1, "trainer__total_training_steps": 100000,
    }  # fmt: skip
    return small_run(tiny_model, arithmetic_files, tmp_path / "run", **changes)


@pytest.fixture
def appeared(shm):
    """Return the first names of the engine's shared memory, once they exist."""
    found, is_over = [], threading.Event()

    def look():
        while not is_over.is_set() and not found:
            found.extend(shm.glob("*session_*"))
            is_over.wait(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    yield found
    is_over.set()
    thread.join()


@pytest.mark.fault("A worker that is killed while it generates with vLLM over two leaves no shared memory, exit 75")
def test_a_killed_rank_of_an_engine_leaves_no_shared_memory(start, words, trap, shm, appeared, tmp_path):
    trap.lay("vllm_generate", signal.SIGKILL, rank=1)
    process = start(words, shm=shm, **trap.environment)
    trap.wait(process)
    started = below(process.pid)
    output = over(process, 75)
    assert re.search(rf"error: .* rank 1 of 2 \(pid {trap.caught} on .*\), in Rollout.generate: the process", output)
    assert appeared
    ended(started)
    gone(tmp_path)
    eventually(lambda: not os.listdir(shm))


@pytest.mark.fault("A driver that is killed while vLLM over two starts leaves no shared memory")
def test_a_driver_killed_in_an_engines_start_leaves_no_shared_memory(start, words, shm, appeared, tmp_path):
    process = start(words, shm=shm)
    wait_while_running(process, lambda: appeared, "shared memory")
    os.kill(process.pid, signal.SIGKILL)
    gone(tmp_path)
    eventually(lambda: not os.listdir(shm))
