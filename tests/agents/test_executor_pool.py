"""ExecutorPool: many trajectories in a process that can be killed, and the other trajectories if one ends the
process."""

import os
import re
import signal
from collections import Counter

import pytest

from rltrain.agents.chat import ToolCall, TrajectoryStart, Turn, TurnLimits
from rltrain.agents.pool import ExecutorPool
from rltrain.agents.toolbox import ToolSources
from rltrain.runtime.slots.limits import Limits, descendants
from tests.clock import PATIENCE_S, eventually
from tests.faults.plug import ended, pids

TOOLS = '''
import asyncio, os, threading


def echo(word: str) -> str:
    """Say it again.

    Args:
        word: Any.
    """
    print("noise")
    return word


def nap(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    threading.Event().wait(seconds)
    return "awake"


BARRIER, HERE = threading.Barrier(64), []


def meet() -> str:
    """Wait for 63 others."""
    BARRIER.wait()
    return "met"


async def doze() -> str:
    """Wait for 63 others without a thread."""
    HERE.append(1)
    while len(HERE) < 64:
        await asyncio.sleep(0)
    return "met"


def pid() -> str:
    """Say which process it is."""
    return str(os.getpid())


def fail(why: str) -> str:
    """Raise.

    Args:
        why: The words.
    """
    raise ValueError(why)


def leave() -> str:
    """End the process."""
    os._exit(3)


def hold() -> str:
    """Hold the interpreter's lock for minutes."""
    return str(len(str(7 ** (1 << 27) % (1 << 90))))


def loop() -> str:
    """Never end."""
    while True:
        pass


def flood() -> str:
    """Return more than anybody reads."""
    return "x" * (64 << 20)
'''
SHOP = '''
import os

class Shop:
    def __init__(self, budget):
        self.left = budget

    def reset(self, row, seed):
        self.folder, self.left = row["extra_info"].get("folder"), self.left + seed

    def buy(self, price: int) -> str:
        """Buy something.

        Args:
            price: Of it.
        """
        self.left -= price
        return f"{self.left} left"

    def quit(self) -> str:
        """End the process."""
        os._exit(1)

    def score(self):
        return {"score": self.left, "spent": 1}

    def close(self):
        if self.folder:
            open(os.path.join(self.folder, "closed"), "a").write("x")
'''
COUNT = '''
class Count:
    """Says how many turns there were."""

    def __init__(self, most=3):
        self.turns, self.most = 0, most

    def step(self, text):
        self.turns += 1
        return f"{self.turns} of {self.most}", 0.5, self.turns == self.most
'''
AGENT = """
import random, asyncio

async def agent(chat, row, seed):
    turn = await chat.reply()
    chat.add("user", f"you said {turn.text}")
    turn = await chat.reply()
    return {"score": float(row["ground_truth"] in turn.text), "turns": len(chat.turns)}

async def moody(chat, row, seed):
    turn = await chat.reply()
    chat.add("user", str(random.random()))
    await chat.reply()
    chat.add("user", "more")
    await chat.reply()

async def broken(chat, row, seed):
    await chat.reply()
    raise RuntimeError("no server")

async def endless(chat, row, seed):
    await chat.reply()
    await asyncio.Event().wait()
"""


@pytest.fixture
def make(tmp_path):
    """Create executors for a file with tools, a class or both."""
    made = []
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "count.py").write_text(COUNT)
    (tmp_path / "agent.py").write_text(AGENT)

    def executors(number=1, timeout_s=PATIENCE_S, trajectory_s=None, parallel=4, memory_mb=4096, kwargs=None, **places):
        places = {name: str(tmp_path / place) for name, place in (places or {"functions": "tools.py"}).items()}
        given = ToolSources(**places, environment_kwargs=kwargs or {})
        terms = TurnLimits(timeout_s, trajectory_s, parallel, 256, "middle")
        made.append(ExecutorPool(given, terms, Limits(timeout_s, memory_mb), number))
        return made[-1]

    yield executors
    for each in made:
        each.shutdown()


NAMES = ("echo", "nap", "meet", "doze", "pid", "fail", "leave", "hold", "loop", "flood", "buy", "quit")


def start(agent=None, seed=0, tools=NAMES, **row):
    return TrajectoryStart(
        [{"role": "user", "content": "?"}], {"extra_info": {}, "ground_truth": "7", **row}, seed, agent, tools
    )


def turn(*calls, text="", **more):
    return Turn(text, [ToolCall(name, arguments) for name, arguments in calls], **more)


def replies(executors, number):
    found = {}

    def come():
        found.update({news.number: news.line for news in executors.poll(0.1)})
        return len(found) >= number

    eventually(come, f"{number} replies")
    assert len(found) == number, found
    return found


def reply(executors):
    (line,) = replies(executors, 1).values()
    return line


def process():
    """Return the first process of the executors: the subreaper of the only one."""
    return (pids(os.getpid(), "rltrain.agents.executor_main") or [0])[0]


def killed():
    """Kill the process, as any program may."""
    os.kill(pid := eventually(process), signal.SIGKILL)
    ended([pid])


def texts(line):
    return [message["content"] for message in line["request"]]


@pytest.mark.parametrize("name", ["meet", "doze"])
def test_many_calls_are_under_way_at_once_in_a_process(make, name):
    executors = make()
    numbers = [executors.start(start(), turn((name, {}), ("echo", {"word": str(at)}))) for at in range(64)]
    found = replies(executors, 64)
    assert [texts(found[number]) for number in numbers] == [["met", str(at)] for at in range(64)]
    assert all(found[number]["counts"]["tool_calls"] == 2 for number in numbers)


def test_call_errors_are_text_for_the_policy(make):
    executors = make(parallel=2)
    said = {
        "raises": turn(("fail", {"why": "no such city"}), ("echo", {"word": "here"})),
        "arguments": turn(("echo", {"wrod": "x"}), ("echo", {"word": "here"})),
        "long": turn(("flood", {}), ("echo", {"word": "here"})),
        "unknown": turn(("fly", {}), ("echo", {"word": "here"})),
        "many": turn(("echo", {"word": "a"}), ("echo", {"word": "here"}), ("echo", {"word": "c"})),
        "unreadable": turn(problems=["it is no JSON."]),
    }
    numbers = {name: executors.start(start(), each) for name, each in said.items()}
    found = replies(executors, len(said))
    lines = {name: found[number] for name, number in numbers.items()}
    assert all(texts(line)[1] == "here" for name, line in lines.items() if name != "unreadable")
    first = {name: texts(line)[0] for name, line in lines.items()}
    assert first["raises"] == "Error: ValueError: no such city"
    assert first["arguments"] == "Error: TypeError: missing a required argument: 'word'"
    assert len(first["long"]) < 300
    assert first["unknown"].startswith("Error: there is no tool 'fly'; the tools are doze, echo")
    assert texts(lines["many"])[2] == "Error: not run: at most 2 calls in a turn"
    assert first["unreadable"] == "Error: it is no JSON."
    counts = {name: line["counts"] for name, line in lines.items()}
    assert counts["many"]["calls_not_run"] == 1
    assert counts["unreadable"]["unreadable_calls"] == 1
    assert "noise" in executors.take_printed()


def test_a_result_notes_its_call_and_how_long_it_took(make):
    executors = make(parallel=1)
    executors.start(start(), turn(("nap", {"seconds": 0.2}), ("echo", {"word": "ü"}), problems=["it is no JSON."]))
    first, second, third = reply(executors)["request"]
    assert first["arguments"] == '{"seconds": 0.2}'
    assert first["seconds"] >= 0.2
    assert (second["arguments"], "seconds" in second) == ('{"word": "ü"}', False), "it was not run"
    assert third.keys() == {"role", "name", "content"}


@pytest.mark.parametrize(
    ("tool", "words"),
    [("leave", "the agent's process ended with exit code 3"), ("hold", "the agent has sent nothing for")],
)
def test_trajectory_that_ends_its_process_fails_alone(make, tool, words):
    executors = make(timeout_s=2.0)
    good = [executors.start(start(), turn(text="a", problems=[str(at)])) for at in range(3)]
    bad = executors.start(start(), turn((tool, {})))
    good += [executors.start(start(), turn(text="b", problems=[str(at)])) for at in range(3, 5)]
    found = replies(executors, 6)
    assert [texts(found[number]) for number in good] == [[f"Error: {at}"] for at in range(5)]
    assert found[bad]["failed"].startswith(words)


def test_call_timeout_replaces_the_busy_process(make):
    executors = make(timeout_s=1.0)
    executors.start(start(), turn(("loop", {})))
    gone = eventually(process)
    line = reply(executors)
    assert texts(line) == ["Error: no result after 1 s"]
    assert line["counts"]["tool_timeouts"] == 1
    ended([gone])
    assert not descendants(gone)
    executors.start(start(), turn(text="x", problems=["on"]))
    assert texts(reply(executors)) == ["Error: on"]


def test_an_instance_lives_as_long_as_its_trajectory(make, tmp_path):
    shop = make(environment="shop.py:Shop", kwargs={"budget": 100})
    number = shop.start(start(seed=1, extra_info={"folder": str(tmp_path)}), turn(("buy", {"price": 30})))
    other = shop.start(start(seed=2), turn(("buy", {"price": 1}), ("buy", {"price": 1})))
    found = replies(shop, 2)
    assert texts(found[number]) == ["71 left"]
    assert texts(found[other]) == ["101 left", "100 left"], "calls of one object run in the order of the turn"
    killed()  # between two turns
    shop.send_turn(number, turn(("buy", {"price": 1})))
    assert texts(reply(shop)) == ["70 left"]
    shop.send_turn(number, turn(text="done"))
    line = reply(shop)
    assert line["end"] == {"score": 70.0, "spent": 1.0}
    eventually(lambda: (tmp_path / "closed").exists() and (tmp_path / "closed").read_text() == "x", "close")
    shop.close(other)


def test_an_environment_answers_every_turn_until_it_is_done(make, tmp_path):
    executors = make(environment="count.py:Count")
    number = executors.start(start(), turn(text="a"))
    assert reply(executors)["request"] == [{"role": "user", "content": "1 of 3"}]
    executors.send_turn(number, turn(text="b"))
    line = reply(executors)
    assert (texts(line), line["rewards"]) == (["2 of 3"], [0.5])
    executors.send_turn(number, turn(text="c"))
    assert reply(executors)["end"] == {"score": 1.5}
    # A truncated turn is not a move. Without room for a response the trajectory ends too.
    executors.start(start(), turn(text="ha", finish="length"))
    assert reply(executors)["end"] == {"score": 0.0}
    number = executors.start(start(), turn(text="a"))
    reply(executors)
    executors.send_turn(number, None)
    assert reply(executors)["end"] == {"score": 0.5}
    # The last turn is a move.
    executors.start(start(), turn(text="a", finish="turns"))
    line = reply(executors)
    assert (line["end"], line["rewards"]) == ({"score": 0.5}, [0.5])


def test_step_may_return_one_message_and_is_named_if_it_returns_anything_else(make, tmp_path):
    (tmp_path / "world.py").write_text("class World:\n    def step(self, text):\n        return eval(text)\n")
    executors = make(environment="world.py:World")
    for returned in ("{'role': 'user', 'content': 'on'}, 0.5, False", "'on', 0, False"):
        executors.start(start(), turn(text=returned))
        assert reply(executors)["request"] == [{"role": "user", "content": "on"}]
    for returned, said in (
        ("None", "it must return (observation, reward, done)"),
        ("7, 0, False", "a list of messages"),
    ):
        executors.start(start(), turn(text=returned))
        failed = reply(executors)["failed"]
        assert "step() returned" in failed
        assert said in failed


def test_agent_failure_reason(make, tmp_path):
    executors, file = make(trajectory_s=2.0), tmp_path / "agent.py"
    numbers = [executors.start(start(f"{file}:{name}"), turn(text="5")) for name in ("broken", "endless")]
    found = replies(executors, 2)
    assert re.search(r"agent\.py.*RuntimeError: no server", found[numbers[0]]["failed"], re.DOTALL)
    assert found[numbers[1]]["failed"] == "not done after 2 s (multi_turn.trajectory_timeout_s)"


def test_restarted_agent_must_repeat_its_messages(make, tmp_path):
    executors, file = make(), tmp_path / "agent.py"
    first = executors.start(start(f"{file}:agent"), turn(text="5"))
    moody = executors.start(start(f"{file}:moody"), turn(text="5"))
    replies(executors, 2)
    killed()
    executors.send_turn(first, turn(text="7"))
    executors.send_turn(moody, turn(text="7"))
    found = replies(executors, 2)
    assert found[first]["end"] == {"score": 1.0, "turns": 2.0}
    assert found[moody]["failed"].startswith("after a restart the agent added other messages")


def test_replies_of_closed_trajectories_are_not_told(make):
    executors = make()
    executors.start(start(), turn(("echo", {"word": "old"})))
    executors.close_all()
    number = executors.start(start(), turn(("echo", {"word": "new"})))
    assert list(replies(executors, 1)) == [number]


def test_trajectories_are_spread_over_the_processes(make):
    executors = make(number=2)
    for _ in range(6):
        executors.start(start(), turn(("pid", {})))
    assert sorted(Counter(texts(line)[0] for line in replies(executors, 6).values()).values()) == [3, 3]


def test_end_is_reported_before_close(make, tmp_path):
    (tmp_path / "slow.py").write_text(COUNT + "    def close(self):\n        import signal; signal.pause()\n")
    executors = make(environment="slow.py:Count", kwargs={"most": 1})
    executors.start(start(), turn(text="a"))
    assert reply(executors)["end"] == {"score": 0.5}
