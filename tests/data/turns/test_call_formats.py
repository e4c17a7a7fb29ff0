"""Calls in a turn: each format's calls, and malformed text for all formats."""

import re

import numpy as np
import pytest

from rltrain.data.turns.calls import FORMATS, Call, Parsed
from rltrain.data.turns.formats.reading import MOST_CALLS

TYPES = {"text": "string", "count": "integer", "share": "number", "sure": "boolean", "rows": "array", "more": "object"}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}},
        },
    }
]
CALL = Call("look_up", {"text": "a b", "count": 3})
# The family's marks of reasoning, and the token that ends its turns.
MARKS = {
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|call|>"),
    "gemma4": ("<|channel>thought\n", "<channel|>", "<turn|>"),
    "mistral": ("[THINK]", "[/THINK]", "</s>"),
    "llama3_json": ("<think>", "</think>", "<|eot_id|>"),
    "deepseek_v3": ("<think>", "</think>", "<｜end▁of▁sentence｜>"),
    "deepseek_v4": ("<think>", "</think>", "<｜end▁of▁sentence｜>"),
    "seed": ("<seed:think>", "</seed:think>", "<seed:eos>"),
    "minimax": ("<think>", "</think>", "[e~["),
    "glm": ("<think>", "</think>", "<|observation|>"),
}
every_format = pytest.mark.parametrize("name", FORMATS)


def read(name, text):
    return FORMATS[name].parse(text, SCHEMAS)


def marks(name):
    return MARKS.get(name, ("<think>", "</think>", "<|im_end|>"))


def random_text(chance):
    letters = [*"ab <>{}[]\"'\\\n:,|=/éß漢🙂", "</think>", "<tool_call>", "null", "</parameter>", '"}']
    return "x" + "".join(chance.choice(letters, chance.integers(0, 12))) + "y"


def random_arguments(chance, text=random_text):
    values = {
        "text": text(chance),
        "count": int(chance.integers(-99, 99)),
        "share": float(chance.integers(1, 99) / 64 + 0.001),
        "sure": bool(chance.integers(2)),
        "rows": [1, "two", [None, False]],
        "more": {"deep": {"er": [text(chance)]}},
    }
    return {name: values[name] for name in chance.permutation(list(TYPES))[: chance.integers(0, 7)]}


@every_format
def test_call_formats_round_trip(name):
    chance = np.random.default_rng(3)
    for _ in range(200):
        arguments = random_arguments(chance)
        # Formats of tags cannot hold their own: that is the families' limit.
        if "</think>" in str(arguments):
            continue
        written = FORMATS[name].write("look_up", arguments)
        parsed = read(name, written + marks(name)[2] * (not written.endswith(marks(name)[2])))
        assert parsed == Parsed([Call("look_up", arguments)], [], "", "")


@every_format
def test_reasoning_is_read_apart_and_a_call_in_it_is_none(name):
    opening, closing, end = marks(name)
    written = FORMATS[name].write(CALL.name, CALL.arguments)
    thought = "maybe" if name == "gpt-oss" else f"maybe {written}"
    ended = written if written.endswith(end) else written + end
    assert read(name, f"{opening}{thought}{closing}{ended}") == Parsed([CALL], [], "", thought)
    assert read(name, f"{opening}{thought}").calls == []
    # Truncated within its reasoning, or with an opening that the generation prompt contains.
    if name not in ("gpt-oss", "gemma4"):
        assert read(name, f"{thought}{closing}{ended}") == Parsed([CALL], [], "", thought)


@every_format
def test_a_turn_without_a_call_is_its_text(name):
    end = marks(name)[2].replace("<|call|>", "<|return|>")
    head = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    texts = [
        "42",
        "",
        "a < b and {c}",
        'no "name" here',
        '{"answer": 42}',
        '{"name": "Bob", "age": 3}',
        "é🙂",
        "[1, 2]",
    ]
    texts += ["set to=5", "look_up is a tool.", '```json\n{"name": 1}\n```', '`{"name": "look_up"}`', "$\\boxed{42}$"]
    for text in texts:
        assert read(name, f"{head}{text}{end}") == Parsed([], [], text, "")


@every_format
def test_truncated_call_is_one_problem(name):
    written = FORMATS[name].write("look_up", {"text": "abc def", "count": 12})
    for place in range(1, len(written)):
        parsed = read(name, written[:place])
        assert len(parsed.calls) + len(parsed.problems) <= 1
        assert parsed.calls in ([], [Call("look_up", {"text": "abc def", "count": 12})])
    assert len(read(name, written[: written.index("def")]).problems) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "look_up", "arguments": {"a": }}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "look_up", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look_up", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=look_up>\n<parameter=text>\nabc\n</function>\n</tool_call>"),
        ("glm", "<tool_call>\n<arg_key>text</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"),
        ("llama3_json", '{"name": "look_up", "parameters": {"a": 1}'),
        ("llama3_json", "<|python_tag|>print(3)<|eom_id|>"),
        ("gpt-oss", " to=functions.look_up<|channel|>commentary json<|message|>{'a': 1}<|call|>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>garbage<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("kimi", "<|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>{<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:look_up{text:<|\"|>abc}<tool_call|>"),
        ("gemma4", "<|tool_call>call:look_up{a:" + "[" * 100_000 + "}<tool_call|>"),
        ("seed", "<seed:tool_call>\n<function=look_up>\n<parameter=text>abc\n</function>\n</seed:tool_call>"),
        ("minimax", "<minimax:tool_call>\nlook_up(text=3)\n</minimax:tool_call>"),
        ("minimax", '<minimax:tool_call><invoke name="look_up"><parameter name="text">a</invoke></minimax:tool_call>'),
        ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look_up">\n</｜DSML｜tool_calls>'),
        ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look_up">\n<｜DSML｜parameter name="text" '
         'string="maybe">a</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'),
    ],
)  # fmt: skip
def test_unreadable_calls_get_an_error_message(name, text):
    parsed = read(name, text)
    assert parsed.calls == []
    assert len(parsed.problems) == 1
    assert parsed.problems[0].endswith(".")
    assert parsed.text == ""


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm", "seed", "minimax", "deepseek_v4"])
def test_several_calls_keep_their_order_and_the_text_around_them(name):
    calls = [Call("look_up", {"count": number}) for number in range(3)]
    written = "\n".join(FORMATS[name].write(call.name, call.arguments) for call in calls)
    assert read(name, f"First.\n{written}") == Parsed(calls, [], "First.", "")


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        # Other forms of a family than the one of `write`.
        ("deepseek_v3", "Checking.<｜tool▁calls▁begin｜>"
         '<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"text": "```python\\nprint(1)\\n```"}<｜tool▁call▁end｜>'
         '<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"count": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
         [Call("look_up", {"text": "```python\nprint(1)\n```"}), Call("look_up", {"count": 3})]),
        ("gpt-oss", "<|channel|>commentary<|message|>Checking.<|end|><|start|>assistant<|channel|>commentary "
         'to=functions.look_up <|constrain|>json<|message|>{"count": 3}<|call|>', [Call("look_up", {"count": 3})]),
        ("mistral", 'Checking.[TOOL_CALLS]look_up[ARGS]{"count": 3}[TOOL_CALLS]look_up[CALL_ID]abc[ARGS]{}</s>',
         [Call("look_up", {"count": 3}), Call("look_up", {})]),
        ("llama3_json", 'Checking.<|python_tag|>{"name": "look_up", "parameters": {"count": 3}}; '
         '{"name": "look_up", "parameters": {}}<|eom_id|>', [Call("look_up", {"count": 3}), Call("look_up", {})]),
        ("seed", "<seed:think>a</seed:think>Checking.\n\n<seed:tool_call>\n<function=look_up>\n"
         "<parameter=rows>[1, \"a\", null]</parameter>\n<parameter=sure>True</parameter>\n"
         "<parameter=text>\n two\nlines </parameter>\n</function>\n"
         "</seed:tool_call><seed:eos>",
         [Call("look_up", {"rows": [1, "a", None], "sure": True, "text": "\n two\nlines "})]),
        ("minimax", 'Checking.<minimax:tool_call><invoke name="look_up"><parameter name="text">3</parameter></invoke>'
         '\n<invoke name="look_up">\n</invoke></minimax:tool_call>[e~[',
         [Call("look_up", {"text": "3"}), Call("look_up", {})]),
        # V3.2.
        ("deepseek_v4", 'Checking.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="look_up">\n<｜DSML｜parameter '
         'name="count" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
         "<｜end▁of▁sentence｜>",
         [Call("look_up", {"count": 3})]),
        ("gemma4", 'Checking.<|tool_call>call:look_up{rows:[1,<|"|>a<|"|>,true],more:{<|"|>k<|"|>:null},x:1.5}',
         [Call("look_up", {"rows": [1, "a", True], "more": {"k": None}, "x": 1.5})]),
        ("gemma4", 'Checking. call:look_up{"text": "a, b",count:3}', [Call("look_up", {"text": "a, b", "count": 3})]),
        ("gpt-oss", 'Checking.<|end|><|start|>assistant<|channel|>commentary to=look_up <|constrain|>json'
         '<|message|>{"count": 3}<|call|>', [Call("look_up", {"count": 3})]),
        ("gpt-oss", 'Checking.<|end|><|start|>assistant to=look_up<|channel|>commentary<|message|>"{\\"count\\": 3}"',
         [Call("look_up", {"count": 3})]),
        ("kimi", 'Checking.<|tool_call_begin|>look_up:12<|tool_call_argument_begin|>{"count": 3}',
         [Call("look_up", {"count": 3})]),
        ("qwen3_coder", "Checking.<function=look_up><parameter=text>a </function> b</parameter></function>",
         [Call("look_up", {"text": "a </function> b"})]),
        ("minimax", 'Checking.<invoke name="look_up"><parameter name="text">a <b> c</parameter></invoke>',
         [Call("look_up", {"text": "a <b> c"})]),
    ],
)  # fmt: skip
def test_other_forms_of_a_family_are_read(name, text, calls):
    parsed = read(name, text)
    assert (parsed.calls, parsed.problems, parsed.text) == (calls, [], "Checking.")


BOTH = [Call("look_up", {"text": "a"}), Call("look_up", {"count": 3})]
JSON = ['{"name": "look_up", "arguments": {"text": "a"}}', '{"name": "look_up", "arguments": {"count": 3}}']


@pytest.mark.parametrize(("name", "opening", "closing"), [
    ("hermes", "<tool_call>", "</tool_call>"), ("mistral", "[TOOL_CALLS]", ""), ("llama3_json", "<|python_tag|>", ""),
    ("llama3_json", "", ""), ("hermes", "", "</tool_call>"), ("hermes", "<tool_call>", ""), ("hermes", "", ""),
    ("mistral", "", ""),
])  # fmt: skip
@pytest.mark.parametrize(
    ("written", "calls"),
    [
        *(([mark.join(JSON), BOTH]) for mark in ("\n", "; ", ", ", "\n\n")),
        (f"[{', '.join(JSON)}]", BOTH),
        ('{"name": "look_up", "parameters": {"text": "a"}}', BOTH[:1]),
        ('{"name": "look_up", "text": "a"}', BOTH[:1]),
        ('{"parameters": "{\\"text\\": \\"a\\"}", "id": "call_1", "type": "function", "name": "look_up"}', BOTH[:1]),
        (f"{JSON[0]}\nI wait.", BOTH[:1]),
        ('{"name": "look_up", "arguments": null}', [Call("look_up", {})]),
        *((text, None) for text in (
            '{"name": "look_up", "arguments": {"text": "a"}, "count": 3}', '{"name": "look_up", "args": {"text": "a"}}',
            '{"name": "look_up", "arguments": {"text": "a"}}, "count": 3}', '{"name": "look_up", "arguments": ["a"]}',
            '{"name": "look_up", "arguments": {"text": "a", "text": "b"}}', '{"name": "look_up", "arguments": "a"}',
            '{"name": "look_up", "arguments": {"share": 1e999}}', '{"name": "look_up", "arguments": {"text": "a',
            '{"name": "look_up", "arguments": {"text": "a"}', "{'name': 'look_up', 'arguments': {'text': 'a'}}",
            '{"name": "look_up", "arguments": {}, "parameters": {"text": "a"}}', f"```json\n{JSON[0]}\n```",
        )),
    ],
)  # fmt: skip
def test_json_is_the_call_that_was_written_or_a_problem(name, opening, closing, written, calls):
    parsed = read(name, opening + written + closing)
    if calls is not None:
        told = "I wait" in written and closing != ""  # words inside the marks
        assert (parsed.calls, bool(parsed.problems)) == ([] if told else calls, told)
    else:
        assert (parsed.calls, bool(parsed.problems)) == ([], True)


@every_format
def test_a_call_without_one_of_its_marks_is_read_or_a_problem(name):
    """The rule: the result is the written call or an error for the policy, never another call and never nothing."""
    calls = [CALL, Call("look_up", {"rows": [1, "b"], "text": "007"})]
    written = "\n".join(FORMATS[name].write(call.name, call.arguments) for call in calls)
    pieces = re.findall(r"<[^<>]*>|\[[A-Z_]+\]|```|[{}\[\]\",:]|\w+|\s+|.", written)
    for place, piece in enumerate(pieces):
        # A parameter without a name belongs to the text of the one before it.
        if not re.fullmatch(r"\w+|\s+|[. ]|<.*parameter[ =].*>", piece):
            parsed = read(name, "".join(pieces[:place] + pieces[place + 1 :]))
            others = [call for call in parsed.calls if call not in calls]
            assert (parsed.calls == calls and not parsed.problems) or parsed.problems or others, piece
            assert all(call.name != "look_up" for call in others), "the session says that there is no such tool"


@every_format
def test_marks_of_reasoning_in_an_argument_are_text(name):
    opening, closing, _ = marks(name)
    for mark in (opening, closing):
        if name == "gpt-oss":  # its marks are tokens, which no text contains
            continue
        call = Call("look_up", {"text": f"a {mark} b"})
        written = FORMATS[name].write(call.name, call.arguments)
        assert read(name, written) == Parsed([call], [], "", "")
        assert read(name, f"{opening}maybe{closing}{written}") == Parsed([call], [], "", "maybe")
        assert read(name, f"{opening}{written}{closing}Fine.").calls == []
        assert len(read(name, written[: written.index(mark) + len(mark) + 2]).problems) == 1, "it is cut"


@every_format
def test_a_draft_in_reasoning_is_never_a_call(name):
    opening, closing, _ = marks(name)
    draft, written = (FORMATS[name].write("look_up", {"text": text}) for text in ("no", "yes"))
    if name != "gpt-oss":
        for begun in (opening, ""):
            assert read(name, f"{begun}{draft}{closing}Fine.") == Parsed([], [], "Fine.", draft)
            parsed = read(name, f"{begun}maybe {draft} or{closing}{written}")
            assert (parsed.calls, parsed.problems) == ([Call("look_up", {"text": "yes"})], [])
        cut = read(name, f"{opening}maybe {draft[:-8]}{closing}{written}")
        assert (cut.calls, cut.problems) == ([Call("look_up", {"text": "yes"})], [])
        assert "the calls in it are not run" in read(name, f"{opening}maybe {draft}").problems[0]


@pytest.mark.parametrize("name", ["qwen3_coder", "seed", "minimax", "deepseek_v4", "glm"])
def test_tags_that_are_left_out_doubled_or_within_a_value_are_a_problem(name):
    written = FORMATS[name].write("look_up", {"text": "a", "more": {"b": 1}})
    end = "</arg_value>" if name == "glm" else re.search(r"</[^<>]*parameter>", written).group()
    first, _, second = written.partition(end)
    parameter = second[: second.index(end) + len(end)].strip()
    for text in (
        first + second,  # the end of a value is missing
        written.replace(parameter, f"{parameter}\n{parameter}"),
        written.replace(parameter, "").replace(">a<", f">{parameter}<") if name in ("seed", "minimax") else first,
    ):
        parsed = read(name, text)
        assert (parsed.calls, len(parsed.problems)) == ([], 1), text


UNTYPED = ["qwen3_coder", "glm", "seed", "minimax"]


@pytest.mark.parametrize("name", UNTYPED)
@pytest.mark.parametrize(
    ("schema", "value", "read_as"),
    [
        *(({"type": "string"}, text, text) for text in ("5", "007", "1e3", "true", "null", "[1]", " a ")),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "5", "5"),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "3.0", 3),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": "number"}, "-2.5e1", -25.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, '[1, "a", null]', [1, "a", None]),
        ({"type": "object"}, '{"a": {"b": 1}}', {"a": {"b": 1}}),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "three", "three"),
        *(({"type": "integer"}, text, None) for text in ("3.5", "007", "three", "null", "true", "1_000", "")),
        *(({"type": "number"}, text, None) for text in ("1e999", "NaN", '"3"', "[3]")),
        *(({"type": "boolean"}, text, None) for text in ("yes", "1", "null")),
        *(({"type": "array"}, text, None) for text in ("a, b", "{}", "['a']", '"[1]"')),
        *(({"type": "object"}, text, None) for text in ("[1]", "{1: 2}", '{"a": 1, "a": 2}', '{"a": 1} b')),
    ],
)
def test_untyped_values_take_the_schema_s_type(name, schema, value, read_as):
    """None is accepted only if the schema allows it. Otherwise the error names the argument and its type."""
    schemas = [{"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    parsed = FORMATS[name].parse(FORMATS[name].write("f", {"x": value}), schemas)
    if read_as is None and "null" not in schema["type"] and "nullable" not in schema:
        assert parsed.calls == []
        assert parsed.problems[0].startswith(f"the argument x must be {schema['type']}, and ")
    else:
        ((call,), problems) = parsed.calls, parsed.problems
        assert (call, problems, type(call.arguments["x"])) == (Call("f", {"x": read_as}), [], type(read_as))


@pytest.mark.parametrize("name", UNTYPED)
@pytest.mark.parametrize("value", ["__import__('os').mkdir('{}')", "[x for x in [open('{}', 'w')]]"])
def test_a_value_is_never_run(name, value, tmp_path):
    """The first version of verl's parser for Qwen 3 ran values."""
    value = value.format(tmp_path / "marker")
    schemas = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "array"}}}}}]
    assert FORMATS[name].parse(FORMATS[name].write("f", {"x": value}), schemas).calls == []
    assert not (tmp_path / "marker").exists()


@every_format
def test_no_text_makes_a_parser_raise(name):
    """A parser must not hang either: with quadratic time, such long texts would exceed the limit of a test."""
    chance = np.random.default_rng(7)
    written = FORMATS[name].write("look_up", {"text": "a", "rows": [[1]], "more": {"b": "c"}})
    pieces = [*marks(name), written, *(written[i : i + 6] for i in range(0, len(written), 6))]
    pieces += ["{", "[", "<", '"', "\\", "\n", "\0", "\ud800", '{"a":', "<tool_call>", "<parameter=a>", "9", "<|", ";"]
    for piece in pieces:
        read(name, piece * (250_000 // len(piece)))
        read(name, written[:-5] + piece * (125_000 // len(piece)))
    assert len(read(name, written * 100).calls) <= MOST_CALLS or name in ("llama3_json", "mistral")
    for _ in range(300):
        read(name, "".join(chance.choice(pieces, chance.integers(1, 20))))
