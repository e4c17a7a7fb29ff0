"""TRL's kind of environments: the same tools, rows and rewards as in TRL."""

import asyncio

import pytest

from rltrain.agents.environments import load_class
from rltrain.agents.toolbox import Toolbox, ToolSources
from rltrain.common.errors import DataError

FILE = '''
from rltrain.agents.ready.trl import adapted


class Counter:
    """Counts."""

    def __init__(self):
        self.total = None

    def reset(self, start=0, **row):
        self.total, self.row = start, row
        return row.get("said")

    def step(self, by: int) -> str:
        """Count on.

        Args:
            by: How far.
        """
        self.total += by
        return f"now {self.total}"

    async def close(self) -> str:
        """End it."""
        return "closed"

    def _inner(self):
        raise AssertionError

    async def get_reward(self) -> float:
        return float(self.total)


class Bare:
    def reset(self, start, ground_truth):
        self.seen = start, ground_truth

    def look(self) -> dict:
        """Look."""
        return {"seen": list(self.seen)}


Env, Plain = adapted(Counter), adapted(lambda: Bare())
'''
ROW = {"data_source": "a", "ground_truth": "7", "extra_info": {"start": 3, "index": 0}}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "env.py").write_text(FILE)
    return f"{tmp_path}/env.py:"


def test_tools_are_all_public_methods_whatever_they_are_called(place):
    box = Toolbox(ToolSources(environment=place + "Env"))
    assert sorted(box.names) == ["close", "step"]
    assert not box.has_step
    (step,) = [schema["function"] for schema in box.schemas if schema["function"]["name"] == "step"]
    assert step["parameters"]["properties"] == {"by": {"type": "integer", "description": "How far."}}


def test_a_trajectory_calls_them_and_earns_its_reward(place):
    async def trajectory():
        session = await Toolbox(ToolSources(environment=place + "Env")).open(ROW, 5)
        told = [(await session.call("step", {"by": by}))["content"] for by in (1, 2)]
        told.append((await session.call("close", {}))["content"])
        return told, await session.environment.score()

    told, score = asyncio.run(trajectory())
    assert told == ["now 4", "now 6", "closed"]
    assert score == 6.0


def test_reset_gets_its_accepted_fields(place):
    async def looked():
        session = await Toolbox(ToolSources(environment=place + "Plain")).open(ROW, 5)
        return (await session.call("look", {}))["content"]

    assert asyncio.run(looked()) == '{"seen": [3, "7"]}'
    assert not hasattr(load_class(place + "Plain"), "score")


def test_a_prompt_has_to_hold_what_reset_returns(place):
    def opened(**extra):
        return asyncio.run(Toolbox(ToolSources(environment=place + "Env")).open({"extra_info": extra}, 0))

    assert opened(said="A board.", observation="A board.").environment
    with pytest.raises(DataError, match=r"reset of Counter returned 'A board.', .* put it at the end of the row's"):
        opened(said="A board.")
