"""Tools in a user's file: which functions are tools, and how the model sees them."""

import pytest

from rltrain.agents.functions import tools_of
from rltrain.common.errors import ConfigError

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
ONE = '''
def {name}(x: {type}) -> str:
    """Do something.

    Args:
        x: A thing.
    """
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read lines.",
        "parameters": {
            "type": "object",
            "properties": {"offset": {"type": "integer", "description": "First line", "minimum": 0}},
            "required": ["offset"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def written(tmp_path):
    def write(text, name="tools.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def marked(mark, imports="from rltrain import tool"):
    """Return the two functions, of which the second is marked."""
    return f"{imports}\n{TWO}".replace("async def", f"@{mark}\nasync def")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (TWO, ["add", "look_up"]),
        (marked("tool"), ["look_up"]),
        (marked('tool(name="search")'), ["search"]),
        (marked('function_tool("search")', "from verl.tools.function_tool import function_tool"), ["search"]),
    ],
)
def test_public_functions_of_the_file_are_tools_or_those_that_are_marked(written, text, names):
    assert list(tools_of(written(text))) == names


def test_a_marked_function_that_is_imported_is_a_tool_and_any_other_is_not(written):
    written(marked("tool"), "neighbour_of_tools.py")
    place = written("from neighbour_of_tools import add, look_up\n" + ONE.format(name="own", type="int"))
    assert list(tools_of(place)) == ["look_up"]
    assert list(tools_of(written("from neighbour_of_tools import add\n" + ONE.format(name="own", type="int")))) == [
        "own"
    ]


def test_a_tool_is_shown_with_its_types_and_words(written):
    schema = tools_of(written(TWO))["add"].schema
    assert schema["type"] == "function"
    assert schema["function"]["name"] == "add"
    assert schema["function"]["description"] == "Add two numbers."
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "One of them."}
    assert schema["function"]["parameters"]["required"] == ["a"]


def test_a_schema_is_written_as_verl_writes_it(written):
    """The order of the names matters, because chat templates show it. verl's records have no ``return``."""
    text = "from typing import Literal\n" + ONE.format(name="f", type="Literal['a', 'b'] | None")
    function = tools_of(written(text))["f"].schema["function"]
    assert list(function) == ["name", "description", "parameters"]
    assert list(function["parameters"]["properties"]["x"])[:3] == ["type", "description", "enum"]


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("int | float", {"type": ["integer", "number"]}),
        ("Literal[1, 2, 3]", {"enum": [1, 2, 3]}),
        ("list[str]", {"type": "array", "items": {"type": "string"}}),
        ("bool", {"type": "boolean"}),
        ("str | None", {"nullable": True}),
    ],
)
def test_types_become_those_of_json(written, kind, shown):
    place = written("from typing import Literal\n" + ONE.format(name="f", type=kind))
    argument = tools_of(place)["f"].schema["function"]["parameters"]["properties"]["x"]
    assert shown.items() <= argument.items()


def test_custom_schema_is_used_unchanged(written):
    text = f"from rltrain import tool\n\n@tool(schema={SCHEMA!r})\ndef f(offset):\n    return ''\n"
    assert tools_of(written(text))["read"].schema == SCHEMA
    assert (
        tools_of(written(text.replace("schema=", "name='other', schema=")))["other"].schema["function"]["name"]
        == "other"
    )
    of_verl = text.replace("rltrain import", "verl.tools.schemas import OpenAIFunctionToolSchema\nfrom rltrain import")
    of_verl = of_verl.replace(f"{SCHEMA!r}", f"OpenAIFunctionToolSchema.model_validate({SCHEMA!r})")
    assert tools_of(written(of_verl, "of_verl.py"))["read"].schema == SCHEMA


def test_a_function_of_two_names_is_one_tool_and_two_of_one_name_are_refused(written):
    place = written(f"{TWO}\nfrom rltrain import tool\nadd = plus = tool(name='add')(add)\n")
    assert list(tools_of(place)) == ["add"]
    both = [f"@tool('twice'){ONE.format(name=name, type='int')}" for name in "fg"]
    with pytest.raises(ConfigError, match="f and g are both the tool 'twice'"):
        tools_of(written("\n".join(["from rltrain import tool", *both]), "twice.py"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "defines no function"),
        ("import nowhere", "cannot be imported"),
        ("def add(a):\n    '''Add.\n\n    Args:\n        a: One.\n    '''", "add has no schema for the model"),
        ("def add(a: int):\n    return a", "add has no schema for the model"),
        (
            "def add(*many: int):\n    '''Add.\n\n    Args:\n        many: All.\n    '''",
            r"a schema cannot describe \*many",
        ),
        ("from rltrain import tool\n@tool(schema={'name': 'x'})\ndef f(): pass", "its schema must be"),
        ("from verl.tools.search_tool import SearchTool", "needs verl.tools.search_tool, which is not installed here"),
    ],
)
def test_a_file_without_a_usable_tool_is_refused_with_the_key(written, text, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        [tool.schema for tool in tools_of(written(text)).values()]
    assert "multi_turn.function_tool_path=" in str(refusal.value)
