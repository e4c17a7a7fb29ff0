"""The second of two workers dies in the phases that a critic and a reference add: it is told, and not what the first
says of its lost partner."""

import os
import re
import signal

import pytest

from tests.faults.plug import Trap, alive, below, error_of, gone, wait_until
from tests.tiny import small_run


@pytest.mark.long
@pytest.mark.usefixtures("own_ray")
@pytest.mark.fault("The worker of two that is killed in a phase of critic, reference, actor or save is named, exit 75")
@pytest.mark.parametrize("phase", Trap.TRAINED)
def test_the_rank_that_died_is_named(start, tiny_model, arithmetic_files, trap, shm, tmp_path, phase):
    changes = {
        "algorithm__adv_estimator": "gae", "critic__model__path": tiny_model, "critic__ppo_mini_batch_size": 2,
        "critic__ppo_max_token_len_per_gpu": 64, "trainer__n_gpus_per_node": 2, "trainer__save_freq": 1,
        "trainer__total_training_steps": 100000, "trainer__max_actor_ckpt_to_keep": 1,
    }  # fmt: skip
    trap.lay(phase, signal.SIGKILL, rank=1)
    words = small_run(tiny_model, arithmetic_files, tmp_path / "run", **changes)
    process = start(words, shm=shm, **trap.environment)
    assert wait_until(lambda: trap.caught or process.poll() is not None)
    started = below(process.pid)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    message = error_of(output)
    named = rf"error: hybrid worker, rank 1 of 2 \(pid {trap.caught} on .*\), in \w+\.?\w*: the process died"
    assert re.match(named, message), message
    assert message.count("error:") == 1
    assert "Traceback" not in output
    assert wait_until(lambda: not alive(started), 20), [started[pid] for pid in alive(started)]
    assert gone(tmp_path)
    assert wait_until(lambda: not os.listdir(shm), 10), os.listdir(shm)
