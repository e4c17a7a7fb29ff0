"""A reward function that keeps what it has seen, in one of two scorers."""

import re
import signal
from pathlib import Path

import pytest

from tests.faults.plug import below, gone, wait_for_line
from tests.tiny import small_run

LEAKS = """
import os
kept = []
try:
    with open({file!r}, "x") as opened:
        opened.write(str(os.getpid()))
    leaks = True
except FileExistsError:
    leaks = False
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if leaks:
        kept.append(b"x" * (1 << 20))
    return len(solution_str) % 3
"""


@pytest.mark.long
@pytest.mark.usefixtures("own_ray")
@pytest.mark.fault("A scorer that leaks memory in a run is named with its pid, once, with how long it can go on")
def test_a_scorer_that_leaks_is_named_once(start, tiny_model, arithmetic_files, tmp_path):
    file = tmp_path / "leaks"
    (tmp_path / "reward.py").write_text(LEAKS.format(file=str(file)))
    changes = {"reward__num_workers": 2, "trainer__total_training_steps": 100000, "trainer__save_freq": -1}
    changes |= {"data__train_batch_size": 2, "actor_rollout_ref__actor__use_kl_loss": False}  # many steps
    reward = {"custom_reward_function__path": tmp_path / "reward.py"}
    # A scorer is known as a child of raylet.
    process = start(small_run(tiny_model, arithmetic_files, tmp_path / "run", **changes, **reward), whole_workers=True)
    said = wait_for_line(process, "holds more and more memory")
    pid = int(Path(file).read_text())
    assert pid in below(process.pid)
    words = r"scorer \(pid (\d+) on \S+\) holds more and more memory: .* MiB a step .* enough for about [\d,]+ steps"
    assert re.findall(words, said) == [str(pid)], said
    wait_for_line(process, "step 135")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 75, rest
    assert "more and more" not in rest
    assert gone(tmp_path)
