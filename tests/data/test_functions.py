"""Tools of a user's file: which functions are tools, what the model is shown of them, and what a call returns."""

import asyncio
import json

import pytest

from rltrain.base.errors import ConfigError
from rltrain.data.functions import ToolCalls, _schema, tools_of

TWO = '''
import json
import math as maths
from pathlib import Path


def add(a: int, b: int = 0) -> str:
    """Add two numbers.

    Args:
        a: One of them.
        b: The other.
    """
    return str(a + b)


async def look_up(word: str) -> dict:
    """Look a word up.

    Args:
        word: In the singular.
    """
    return {"found": [word]}


def _inner(x):
    return x
'''
MARKED = TWO.replace("async def", "@tool\nasync def").replace("import json", "import json\nfrom rltrain import tool")
REWARDED = '''
def judged(answer: str):
    """Judge an answer.

    Args:
        answer: A number.
    """
    return {"right": answer == "4"}, 0.5, {"seen": 1}
'''


def written(folder, text, name="tools.py"):
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(("text", "names"), [(TWO, ["add", "look_up"]), (MARKED, ["look_up"])])
def test_public_functions_of_the_file_are_tools_or_those_that_are_marked(tmp_path, text, names):
    assert list(tools_of(written(tmp_path, text))) == names


def test_a_tool_is_shown_with_its_types_and_words(tmp_path):
    place = written(tmp_path, TWO)
    schema = _schema(place, tools_of(place)["add"])
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "One of them."}
    assert schema["function"]["parameters"]["required"] == ["a"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "defines no function"),
        ("import nowhere", "cannot be imported"),
        ("def add(a):\n    '''Add.\n\n    Args:\n        a: One.\n    '''", "add cannot be shown to the model"),
        ("def add(a: int):\n    return a", "add cannot be shown to the model"),
    ],
)
def test_a_file_without_a_usable_tool_is_refused_with_the_key(tmp_path, text, words):
    place = written(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as refusal:
        [_schema(place, function) for function in tools_of(place).values()]
    assert "multi_turn.function_tool_path=" in str(refusal.value)


def test_what_a_tool_returns_is_a_text_and_a_reward(tmp_path):
    calls = ToolCalls(written(tmp_path, TWO))
    assert asyncio.run(calls("add", {"a": 2, "b": 3})) == {"text": "5", "reward": 0.0}
    assert json.loads(asyncio.run(calls("look_up", {"word": "ox"}))["text"]) == {"found": ["ox"]}
    judged = ToolCalls(written(tmp_path, REWARDED, "rewarded.py"))
    assert asyncio.run(judged("judged", {"answer": "4"})) == {"text": '{"right": true}', "reward": 0.5}
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
        asyncio.run(calls("add", {"c": 1}))
