"""Formats by name: verl's formats, and a user's function."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rltrain.common.errors import ConfigError
from rltrain.data.row_tools import RowTools
from rltrain.data.turns.calls import FORMATS, Call
from rltrain.data.turns.detect import format_of
from tests.data.turns.families import SCHEMAS

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
# From verl's ToolParser registry.
OF_VERL = [
    "hermes", "gpt-oss", "qwen3_coder", "glm", "seed", "minimax", "kimi", "gemma4", "deepseek_v4", "llama3_json",
]  # fmt: skip
PARSE = '''
import re

def parse(text, schemas):
    """`call NAME(KEY=VALUE)`."""
    calls = []
    for name, arguments in re.findall(r"call (\\w+)\\((.*?)\\)", text):
        if "=" not in arguments:
            raise ValueError("an argument is written KEY=VALUE.")
        key, _, value = arguments.partition("=")
        calls.append({"name": name, "arguments": {key: value, "of": len(schemas)}})
    if "die" in text:
        raise LookupError("a mistake")
    if "nothing" in text:
        return None
    if "bare" in text:
        return [{"arguments": {}}]
    return calls

parse.stop_tokens = ["<|over|>"]
'''


@pytest.fixture
def own(tmp_path, family):
    """Return the format of a function in a file."""
    encoder = family("hermes")
    encoder.row_tools = RowTools(SCHEMAS)
    yield lambda code, name="parse": (
        (tmp_path / "own.py").write_text(code),
        format_of(f"{tmp_path / 'own.py'}:{name}", encoder),
    )[1]
    encoder.row_tools = RowTools()


@pytest.mark.parametrize("name", OF_VERL)
def test_every_name_of_verl_is_taken(family, name):
    assert format_of(name, family("lfm")) is FORMATS[name]


def test_unknown_tool_name_lists_the_tools(family):
    with pytest.raises(ConfigError, match=r"multi_turn.format=hermess: no format has this name") as refusal:
        format_of("hermess", family("hermes"))
    assert all(name in str(refusal.value) for name in [*FORMATS, "FILE.py:NAME"])
    with pytest.raises(ConfigError, match="the chat template writes calls in no known format"):
        format_of("auto", replace(family("lfm"), row_tools=RowTools(SCHEMAS)))


def test_without_tools_no_turn_has_a_call(family):
    text = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
    said = format_of("auto", family("hermes")).parse(text, [])
    assert (said.calls, said.problems, said.reasoning) == ([], [], "Hm.")
    assert said.text == '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


def test_the_function_of_the_page_reads_what_it_says(own):
    code = re.search(r"```python\n(# calls.py.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL).group(1)
    call_format = own(code)
    said = "<think>@add(a=1)</think>@add(a=2)<|call|>"
    assert call_format.parse(said, SCHEMAS).calls == [Call("add", {"a": "2"})]
    assert call_format.parse("@add(2)", SCHEMAS).problems == ["an argument is written KEY=VALUE."]
    assert call_format.stop_tokens == ("<|call|>",)


def test_errors_of_a_custom_format_are_unreadable_calls(own, caplog):
    call_format = own(PARSE)
    assert call_format.parse("call f(3)", SCHEMAS).problems == ["an argument is written KEY=VALUE."]
    assert "a call must be a JSON object" in call_format.parse("bare", SCHEMAS).problems[0]
    assert not caplog.records
    for text in ("die", "die", "nothing"):
        assert call_format.parse(text, SCHEMAS).problems == ["the call cannot be read."]
    assert len(caplog.records) == 1, "once in a process"
    assert "LookupError: a mistake" in caplog.text
    assert len(call_format.parse("call f(a=b) " * 1000, SCHEMAS).calls) == 64


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def parse(text, schemas): return None", "returned NoneType, not a list"),
        ("def parse(text): return []", "takes 1 positional argument but 2 were given"),
        (
            "def parse(text, schemas): return [{'name': 'f', 'arguments': '3'}]",
            "arguments of a call must be a JSON object",
        ),
        ("def parse(text, schemas): return [{'name': 'f', 'arguments': {}}]", "found calls in the turn ''"),
        ("def parse(text, schemas): return []\nparse.stop_tokens = '<x>'", "stop_tokens is '<x>'"),
        ("import no_such_package", "cannot be imported"),
    ],
)
def test_a_wrong_function_is_refused_before_the_run(own, code, words):
    with pytest.raises(ConfigError) as refusal:
        own(code)
    assert words in str(refusal.value)
    assert str(refusal.value).startswith("actor_rollout_ref.rollout.multi_turn.format=")
