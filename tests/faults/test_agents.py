"""Failures of tools, environments and agents: the step finishes, the other responses are those of an undisturbed run,
and no process is left."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rltrain.common.columns import names as c
from rltrain.workers.interface.tasks import GenerateTask
from rltrain.workers.rollout.contract import Sampling
from tests.clock import PATIENCE_S
from tests.faults.plug import over, processes_of
from tests.faults.test_resume import kept, told
from tests.ranks import MARK
from tests.tiny import small_run
from tests.tiny_tools import save_calling_model, tool_run

R = "actor_rollout_ref__rollout__"
TURNS = R + "multi_turn__"
NUM_PROMPTS = 12
# For calls that never end; all other calls have as long as a busy machine may need.
LATE_S = 10.0
TOOLS = '''
import os, resource, select, signal, sys


def hold():
    return len(str(7 ** (1 << 27) % (1 << 90)))


def loop():
    while True:
        pass


def leave():
    os._exit(3)


def bomb():
    """Processes in sessions of their own that start others as long as the system lets them: it lets this user 48."""
    if child := os.fork():
        os.waitpid(child, 0)
    if os.getuid() == 0:  # root has no limit
        os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (48, 48))
    while True:
        try:
            if not os.fork():
                os.setsid()
        except BlockingIOError:
            select.select([], [], [], 0.05)


def orphans():
    for _ in range(20):
        if not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)
            signal.pause()
    return "5"


def memory():
    return len(bytearray(8 << 30))


def prints():
    for _ in range(100):
        print("x" * (1 << 20))
    return "5"


WHAT = {"10 MB": lambda: "x" * (10 << 20)}


class Adds:
    """Tools that answer well, but for one row."""

    def __init__(self, what="", row=-1):
        self.what, self.row = what, row

    def reset(self, row, seed):
        self.is_bad = row["extra_info"]["index"] == self.row

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One of them.
            b: The other.
        """
        return (WHAT.get(self.what) or globals()[self.what])() if self.is_bad else str(a + b)
'''
ENVIRONMENT = """
class Says:
    def __init__(self, what="", row=-1):
        self.what, self.row, self.turns = what, row, 0

    def reset(self, row, seed):
        self.is_bad = row["extra_info"]["index"] == self.row

    def step(self, text):
        self.turns += 1
        words = "x" * (10 << 20) if self.is_bad and self.what == "10 MB" else f"turn {self.turns}"
        return words, 0.5, self.turns == 2 and not self.is_bad
"""
AGENT = """
import asyncio

async def waits(chat, row, seed):
    await chat.reply()
    if row["extra_info"]["index"] == ROW:
        await asyncio.Event().wait()
    chat.add("user", "again")
    await chat.reply()

async def never_ends(chat, row, seed):
    await chat.reply()
    while row["extra_info"]["index"] == ROW:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
    chat.add("user", "again")
    await chat.reply()
"""


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    return save_calling_model(tmp_path_factory.mktemp("calling") / "model")


@pytest.fixture
def played(process_group, tiny_trainer, calling, tmp_path, monkeypatch):
    """played(code, **keys): return the responses of a run, one per prompt, up to the number of requested turns, and the
    remaining processes."""

    monkeypatch.setenv(MARK, str(tmp_path))

    def play(code, **keys):
        (tmp_path / "own.py").write_text(code)
        run = tool_run(calling, tmp_path)
        del run[TURNS + "function_tool_path"]
        run |= {R + "n": 1, "algorithm__adv_estimator": "reinforce_plus_plus", TURNS + "tool_timeout_s": PATIENCE_S}
        trainer = tiny_trainer(**run | keys)
        worker = trainer.worker.rollout
        places = np.arange(NUM_PROMPTS, dtype=np.int32)
        task = GenerateTask("train", places, 1, Sampling(400, 1.0), seed=1, step=1, call=next(trainer.calls))
        batch, texts, numbers = worker.generate(task)
        worker._answering._executors.shutdown()
        log = tmp_path / "agents.log"
        rows = (batch.ragged(name).rows() for name in (c.RESPONSE, c.RESPONSE_MASK))
        answers = [(answer.tolist(), mask.tolist()) for answer, mask in zip(*rows, strict=True)]
        return SimpleNamespace(
            answers=answers, told=[text.trajectory_info for text in texts], numbers=numbers.per_sample,
            printed=log.read_text() if log.exists() else "", left=processes_of(tmp_path),
        )  # fmt: skip

    return play


def first(quiet, count):
    """Return the row of the first response with at least one turn that got a reply."""
    return int(np.flatnonzero(quiet.numbers[count] > (count == c.NUM_TURNS))[0])


def others_are_as_in(quiet, hurt, row):
    assert [each for at, each in enumerate(hurt.answers) if at != row] == [
        each for at, each in enumerate(quiet.answers) if at != row
    ]
    for name in (*c.OF_TURNS, c.NUM_TURNS, c.AGENT_FAILED):
        assert np.delete(hurt.numbers[name], row).tolist() == np.delete(quiet.numbers[name], row).tolist(), name
    assert not hurt.left


LATE = f"Error: no result after {LATE_S:g} s"
CUT = "xxx...(truncated)...xxx"
MEMORY = "Error: MemoryError"
# The message to the policy, or the reason why the response is excluded.
FAULTS = {
    "hold": "the agent has sent nothing for",
    "leave": "the agent's process ended with exit code 3",
    "loop": LATE,
    "bomb": LATE,
    "orphans": "5",
    "memory": MEMORY,
    "prints": "5",
    "10 MB": CUT,
}
QUICK = ("memory",)


@pytest.mark.fault("Whatever a tool does, the step ends, other responses equal an undisturbed run, no process is left")
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what in QUICK else pytest.mark.long) for what in FAULTS]
)
def test_a_tool_does_its_worst(played, tmp_path, what):
    words = FAULTS[what]
    keys = {TURNS + "environment": f"{tmp_path}/own.py:Adds"}
    keys |= {TURNS + "tool_timeout_s": LATE_S} if words == LATE or what == "hold" else {}
    quiet = played(TOOLS, **keys)
    row = first(quiet, c.TOOL_CALLS)
    hurt = played(TOOLS, **keys, **{TURNS + "environment_kwargs": f"{{what: {what}, row: {row}}}"})
    others_are_as_in(quiet, hurt, row)
    numbers = {name: int(each[row]) for name, each in hurt.numbers.items() if each.dtype != object}
    if what in ("hold", "leave"):
        assert hurt.told[row]["agent_failed"].startswith(words)
        assert numbers[c.AGENT_FAILED] == 1
        return
    results = [message["content"] for message in hurt.told[row]["messages"] if message["role"] == "tool"]
    assert results
    assert all(words in result for result in results), results
    # The call of the last turn has no room for a result, so it is not shown.
    assert numbers[c.TOOL_CALLS] - len(results) in (0, 1)
    assert numbers[c.TOOL_TIMEOUTS] == (numbers[c.TOOL_CALLS] if words == LATE else 0)
    assert numbers[c.TOOL_ERRORS] == (numbers[c.TOOL_CALLS] if words.startswith("Error") else 0)
    assert len(hurt.printed) < 1 << 20
    assert ("more bytes were printed here and are omitted" in hurt.printed) == (what == "prints")


@pytest.mark.fault("An environment that never ends, or says 10 MB at once, ends its own answer alone")
@pytest.mark.parametrize("what", ["never done", pytest.param("10 MB", marks=pytest.mark.long)])
def test_an_environment_does_its_worst(played, tmp_path, what):
    keys = {TURNS + "environment": f"{tmp_path}/own.py:Says"}
    quiet = played(ENVIRONMENT, **keys)
    row = first(quiet, c.NUM_TURNS)
    hurt = played(ENVIRONMENT, **keys, **{TURNS + "environment_kwargs": f"{{what: {what}, row: {row}}}"})
    others_are_as_in(quiet, hurt, row)
    assert quiet.numbers[c.NUM_TURNS].max() == 2
    if what == "never done":
        assert hurt.numbers[c.NUM_TURNS][row] > 2
        assert hurt.numbers[c.TRUNCATED][row]
        assert hurt.told[row]["agent_score"] == 0.5 * len(hurt.told[row]["tool_rewards"])
    else:
        assert "bytes of messages at once; the limit is 1,048,576" in hurt.told[row]["agent_failed"]


@pytest.mark.fault("An agent that waits without end, or cannot be cancelled, is left out after its time")
@pytest.mark.parametrize("name", ["waits", pytest.param("never_ends", marks=pytest.mark.long)])
def test_an_agent_does_its_worst(played, tmp_path, name):
    keys = {R + "agent__default_agent_loop": f"{tmp_path}/own.py:{name}", TURNS + "trajectory_timeout_s": LATE_S}
    quiet = played(AGENT.replace("ROW", "-1"), **keys)
    row = first(quiet, c.NUM_TURNS)
    hurt = played(AGENT.replace("ROW", str(row)), **keys)
    others_are_as_in(quiet, hurt, row)
    assert hurt.told[row]["agent_failed"] == f"not done after {LATE_S:g} s (multi_turn.trajectory_timeout_s)"
    assert hurt.numbers[c.AGENT_FAILED][row]


# Once a checkpoint exists, the environment kills the driver between two turns of a response.
FUSE = """
import os, signal

class Fuse:
    def on_save(self, step, folder):
        if "FUSE" in os.environ:
            with open(FOLDER + "/laying", "w") as file:
                file.write(str(os.getpid()))
            os.rename(FOLDER + "/laying", FOLDER + "/laid")

class Says:
    def __init__(self):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        if self.turns == 2:
            try:
                os.rename(FOLDER + "/laid", FOLDER + "/lit")
                os.kill(int(open(FOLDER + "/lit").read()), signal.SIGKILL)
            except FileNotFoundError:
                pass
        return f"turn {self.turns}", len(text) % 5 / 5, self.turns == 3
"""
STEPS = 4


@pytest.mark.long
@pytest.mark.usefixtures("joined")
@pytest.mark.fault("A run with an environment whose driver is killed between two turns ends bit for bit as a quiet one")
def test_a_driver_killed_between_turns_is_resumed_as_if_nothing_had_been(start, calling, arithmetic_files, tmp_path):
    (tmp_path / "own.py").write_text(FUSE.replace("FOLDER", repr(str(tmp_path))))
    run = tool_run(calling, tmp_path)
    del run[TURNS + "function_tool_path"]
    run |= {
        TURNS + "environment": f"{tmp_path}/own.py:Says", "trainer__callbacks": f"[{tmp_path}/own.py:Fuse]",
        "trainer__save_freq": 1, "trainer__total_training_steps": STEPS,
        "actor_rollout_ref__actor__checkpoint__save_contents": "[model]", "trainer__n_gpus_per_node": 2,
    }  # fmt: skip
    folders = tmp_path / "quiet", tmp_path / "killed"
    over(start(small_run(calling, arithmetic_files, folders[0], **run)))
    codes = []
    while 0 not in codes and len(codes) < STEPS:
        process = start(small_run(calling, arithmetic_files, folders[1], **run), FUSE="1")
        output, _ = process.communicate(timeout=300)
        codes.append(process.returncode)
        assert codes[-1] in (0, -9), output
    assert codes[-1] == 0
    assert -9 in codes
    one, other = map(told, folders)
    # The time of the replies determines which turns are decoded together, and so the engine's rounding.
    differ = [
        (name, one[step][name], other[step].get(name, 0.0))
        for step in one
        for name in one[step]
        if one[step][name] != other[step].get(name, 0.0)
    ]
    assert {
        name for name, *_ in differ if name.partition("/")[0] not in ("rollout", "rollout_corr", "training")
    } == set()
    # A perplexity of 55 moves by its share of the rounding of the log-probs.
    assert all(math.isclose(number, again, rel_tol=3e-6, abs_tol=1e-5) for _, number, again in differ), differ
    one, other = (kept(folder) for folder in folders)
    assert one.keys() == other.keys()
    assert [name for name, each in one.items() if each != other[name]] == []
    assert max(line["num_turns/max"] for line in told(folders[0]).values()) >= 4
