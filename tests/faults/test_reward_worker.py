"""A reward worker that is killed or stopped while it scores a slow response."""

import os
import re
import signal
import socket

import pytest

from tests.clock import eventually
from tests.faults.plug import below, ended, error_of, gone, over, wait_for_step
from tests.tiny import small_run

# Every call of such a run takes seconds, and so do the slow responses.
LIMIT_S = 45
REWARD = """
import os, select
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if os.path.exists({slow!r}):
        with open(f"/proc/{{os.getppid()}}/stat") as opened:  # of the subreaper, whose parent is the worker
            worker = opened.read().rpartition(")")[2].split()[1]
        with open({scoring!r}, "a") as opened:
            opened.write(f"{{worker}}\\n")
        select.select([], [], [], 2)  # a slow answer, in time
    return len(solution_str) % 3
"""


@pytest.mark.long
@pytest.mark.usefixtures("own_ray")
@pytest.mark.fault("A reward worker that is killed or stopped while it scores is named with its node, exit 75")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (signal.SIGKILL, r"the process died: it was killed, or memory ran out\. "),
        (
            signal.SIGSTOP,
            r"not done after \d+ s \(no reply: stopped, or .*\)\. Stacks of the responding processes: ",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_a_reward_worker_that_ends_while_it_scores_is_named(start, tiny_model, arithmetic_files, tmp_path, how, words):
    slow, scoring, run = tmp_path / "slow", tmp_path / "scoring", tmp_path / "run"
    (tmp_path / "reward.py").write_text(REWARD.format(slow=str(slow), scoring=str(scoring)))
    changes = {
        "custom_reward_function__path": tmp_path / "reward.py",
        "reward__num_workers": 2,
        "reward__timeout_s": 4,
        "trainer__total_training_steps": 100000,
        "trainer__hang_timeout_s": LIMIT_S,
        "trainer__save_freq": -1,
    }
    process = start(small_run(tiny_model, arithmetic_files, run, **changes))
    wait_for_step(run, 1, process)
    slow.touch()
    eventually(lambda: scoring.exists() and scoring.read_text().endswith("\n"))
    started, victim = below(process.pid), int(scoring.read_text().split()[0])
    assert started[victim].startswith("ray::RewardWorker")
    os.kill(victim, how)
    output = over(process, 75)
    message = error_of(output)
    who = rf"error: reward worker \d of 2 \(pid {victim} on {re.escape(socket.gethostname())}\), in scoring answers: "
    assert re.match(who + words, message), message
    assert "Run the same command again" in message
    assert not re.search(r"Traceback|actor|ray\.|RayActor", message.partition("Ray's logs")[0]), message
    ended(started)
    gone(tmp_path)
