"""Calls in a turn: what every format reads, and what none of them falls over."""

import time

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
# How the family marks reasoning, and the token that ends its turns.
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
def test_what_a_format_writes_it_reads(name):
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
    # Cut while it reasons, or with an opening that the generation prompt has written.
    if name not in ("gpt-oss", "gemma4"):
        assert read(name, f"{thought}{closing}{ended}") == Parsed([CALL], [], "", thought)


def test_a_call_in_the_analysis_channel_is_none():
    call = FORMATS["gpt-oss"].write("look_up", {}).replace("commentary", "analysis")
    parsed = read("gpt-oss", call)
    assert parsed.calls == []
    assert "commentary" in parsed.problems[0]
    assert read("gpt-oss", f"<|channel|>analysis<|message|>{{}}{'<|end|>'}").reasoning == "{}"


@every_format
def test_a_turn_without_a_call_is_its_text(name):
    end = marks(name)[2].replace("<|call|>", "<|return|>")
    head = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    for text in ("42", "", "a < b and {c}", 'no "name" here', '{"answer": 42}', '{"name": "Bob", "age": 3}', "é🙂"):
        assert read(name, f"{head}{text}{end}") == Parsed([], [], text, "")


@every_format
def test_a_call_that_is_cut_is_one_problem(name):
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
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>["look_up"]</tool_call>'),
        ("hermes", '<tool_call>{"name": "look_up", "arguments": "text"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look_up", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look_up", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look_up"}{"name": "look_up"}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=look_up>\n<parameter=text>\nabc\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\nlook_up(text=3)\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>\n<arg_key>text</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"),
        ("glm", "<tool_call>look_up\n<arg_key>text</arg_key>\n</tool_call>"),
        ("llama3_json", '{"name": "look_up", "parameters": {"a": 1}'),
        ("llama3_json", "<|python_tag|>print(3)<|eom_id|>"),
        ("gpt-oss", " to=functions.look_up<|channel|>commentary json<|message|>{'a': 1}<|call|>"),
        ("gpt-oss", " to=functions.look_up<|channel|>commentary json<|message|>[]<|call|>"),
        ("gpt-oss", " to=functions.look_up<|channel|>commentary json<|call|>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>garbage<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{a}<｜tool▁call▁end｜>"),
        ("kimi", "<|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>{<|tool_call_end|>"),
        ("mistral", "[TOOL_CALLS][]</s>"),
        ("mistral", "[TOOL_CALLS]look_up</s>"),
        ("gemma4", "<|tool_call>call:look_up{text:<|\"|>abc}<tool_call|>"),
        ("gemma4", "<|tool_call>look_up{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:look_up{a:" + "[" * 100 + "]" * 100 + "}<tool_call|>"),
        ("seed", "<seed:tool_call>\n<parameter=text>abc</parameter>\n</seed:tool_call>"),
        ("seed", "<seed:tool_call>\n<function=look_up>\n<parameter=text>abc\n</function>\n</seed:tool_call>"),
        ("minimax", "<minimax:tool_call>\nlook_up(text=3)\n</minimax:tool_call>"),
        ("minimax", '<minimax:tool_call>\n<invoke name="">\n</invoke>\n</minimax:tool_call>'),
        ("minimax", '<minimax:tool_call>\n<invoke name="look_up">\n<parameter name="text"\n</invoke>\n'),
        ("minimax", '<minimax:tool_call><invoke name="look_up"><parameter name="text">a</invoke></minimax:tool_call>'),
        ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look_up">\n</｜DSML｜tool_calls>'),
        ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look_up">\n<｜DSML｜parameter name="text" '
         'string="maybe">a</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'),
        ("deepseek_v4", "<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_is_said_in_words(name, text):
    parsed = read(name, text)
    assert parsed.calls == []
    assert len(parsed.problems) == 1
    assert parsed.problems[0].endswith(".")
    assert parsed.text == ""


def test_a_call_behind_one_that_cannot_be_read_is_read():
    good = FORMATS["hermes"].write(CALL.name, CALL.arguments)
    parsed = read("hermes", f"<tool_call>{{</tool_call>\n{good}\nand then")
    assert parsed.calls == [CALL]
    assert len(parsed.problems) == 1
    assert parsed.text == "and then"


@pytest.mark.parametrize("name", ["minimax", "deepseek_v4"])
def test_calls_of_a_block_before_one_that_cannot_be_read_are_read(name):
    first, second = (FORMATS[name].write("look_up", {"text": text}) for text in ("one", "two"))
    opening, _, call = first.partition("\n")
    call, _, closing = call.rpartition("\n")
    block = f"{opening}\n{call}\n{call.replace('parameter name=', 'parameter nam')}\n{closing}\n{second}"
    parsed = read(name, block)
    assert parsed.calls == [Call("look_up", {"text": "one"}), Call("look_up", {"text": "two"})]
    assert len(parsed.problems) == 1
    assert read(name, f"{opening}\n{call}\n{call}\n{closing}").calls == [Call("look_up", {"text": "one"})] * 2


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm", "seed", "minimax", "deepseek_v4"])
def test_several_calls_keep_their_order_and_the_text_around_them(name):
    calls = [Call("look_up", {"count": number}) for number in range(3)]
    written = "\n".join(FORMATS[name].write(call.name, call.arguments) for call in calls)
    assert read(name, f"First.\n{written}") == Parsed(calls, [], "First.", "")


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        # Forms that a family writes beside the one of `write`.
        ("deepseek_v3", "Checking.<｜tool▁calls▁begin｜>"
         '<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"text": "```python\\nprint(1)\\n```"}<｜tool▁call▁end｜>'
         '<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"count": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
         [Call("look_up", {"text": "```python\nprint(1)\n```"}), Call("look_up", {"count": 3})]),
        ("deepseek_v3", "Checking.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n"
         '{"text": "```"}\n```\n<｜tool▁call▁end｜><｜tool▁calls▁end｜>\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'
         'function<｜tool▁sep｜>look_up\n```json\n{"count": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
         [Call("look_up", {"text": "```"}), Call("look_up", {"count": 3})]),
        ("gpt-oss", "<|channel|>commentary<|message|>Checking.<|end|><|start|>assistant<|channel|>commentary "
         'to=functions.look_up <|constrain|>json<|message|>{"count": 3}<|call|>', [Call("look_up", {"count": 3})]),
        ("mistral", 'Checking.[TOOL_CALLS] [{"name": "look_up", "arguments": {"count": 3}, "id": "abcdefghi"}, '
         '{"name": "look_up", "arguments": {}}]</s>', [Call("look_up", {"count": 3}), Call("look_up", {})]),
        ("mistral", 'Checking.[TOOL_CALLS]look_up[ARGS]{"count": 3}[TOOL_CALLS]look_up[CALL_ID]abc[ARGS]{}</s>',
         [Call("look_up", {"count": 3}), Call("look_up", {})]),
        ("kimi", "Checking.<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:4"
         '<|tool_call_argument_begin|>{"count": 3}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
         [Call("look_up", {"count": 3})]),
        ("llama3_json", 'Checking.<|python_tag|>{"name": "look_up", "parameters": {"count": 3}}; '
         '{"name": "look_up", "parameters": {}}<|eom_id|>', [Call("look_up", {"count": 3}), Call("look_up", {})]),
        ("glm", "Checking.<tool_call>look_up<arg_key>count</arg_key><arg_value>3</arg_value></tool_call>"
         "<|observation|>", [Call("look_up", {"count": 3})]),
        ("qwen3_coder", "Checking.<tool_call>\n<function=look_up>\n<parameter=count>3</parameter>\n</function>",
         [Call("look_up", {"count": 3})]),
        ("seed", "<seed:think>a</seed:think>Checking.\n\n<seed:tool_call>\n<function=look_up>\n"
         "<parameter=rows>[1, 'a', None]</parameter>\n<parameter=sure>True</parameter>\n"
         "<parameter=text>\n two\nlines </parameter>\n</function>\n"
         "</seed:tool_call><seed:eos>",
         [Call("look_up", {"rows": [1, "a", None], "sure": True, "text": "\n two\nlines "})]),
        ("minimax", 'Checking.<minimax:tool_call><invoke name="look_up"><parameter name="text">3</parameter></invoke>'
         '\n<invoke name="look_up">\n</invoke></minimax:tool_call>[e~[',
         [Call("look_up", {"text": "3"}), Call("look_up", {})]),
        # V3.2, V4.1, and a parameter that does not say what it is.
        ("deepseek_v4", 'Checking.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="look_up">\n<｜DSML｜parameter '
         'name="count" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
         "<｜end▁of▁sentence｜>",
         [Call("look_up", {"count": 3})]),
        ("deepseek_v4", 'Checking.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="look_up">\n<｜DSML｜ parameter '
         'name="text" string="true">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls><｜end▁of▁sentence｜>',
         [Call("look_up", {"text": "3"})]),
        ("deepseek_v4", 'Checking.<｜DSML｜tool_calls><｜DSML｜invoke name="look_up"><｜DSML｜parameter name="text">3'
         '</｜DSML｜parameter><｜DSML｜parameter name="more" string="false">{"a": [1]}</｜DSML｜parameter>'
         "</｜DSML｜invoke>",
         [Call("look_up", {"text": "3", "more": {"a": [1]}})]),
        ("gemma4", '<|tool_call>call:look_up{rows:[1,<|"|>a<|"|>,true],more:{<|"|>k<|"|>:null},x:1.5}',
         [Call("look_up", {"rows": [1, "a", True], "more": {"k": None}, "x": 1.5})]),
    ],
)  # fmt: skip
def test_other_forms_of_a_family_are_read(name, text, calls):
    parsed = read(name, text)
    assert (parsed.calls, parsed.problems) == (calls, [])
    assert parsed.text == ("" if name == "gemma4" or ("```json" in text and "Checking" not in text) else "Checking.")


def test_ids_are_kept_as_the_model_wrote_them():
    text = FORMATS["kimi"].write("look_up", {}).replace(":0", ":7")
    assert [call.id for call in read("kimi", text).calls] == ["functions.look_up:7"]
    listed = '[TOOL_CALLS][{"name": "look_up", "arguments": {}, "id": "abcdefghi"}]'
    assert [call.id for call in read("mistral", listed).calls] == ["abcdefghi"]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "seed", "minimax"])
@pytest.mark.parametrize(
    ("schema", "value", "read_as"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "null", None),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "9" * 4, 9999),
        ({"type": "number"}, "3.0", 3),
        ({"type": "number"}, "-2.5e1", -25),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "nan", "nan"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "maybe", "maybe"),
        ({"type": "array"}, "[1, 2, 3]", [1, 2, 3]),
        ({"type": "array"}, "[1, 'a', None]", [1, "a", None]),
        ({"type": "array"}, "(1, 2)", [1, 2]),
        ({"type": "array"}, "__import__('os').getcwd()", "__import__('os').getcwd()"),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "object"}, '{"a": {"b": 1}}', {"a": {"b": 1}}),
        ({"type": "object"}, "{'a': 1}", {"a": 1}),
        ({"type": "object"}, "{" * 500, "{" * 500),
        ({"type": ["integer", "null"]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "three", "three"),
    ],
)
def test_untyped_values_take_the_schema_s_type(name, schema, value, read_as):
    schemas = [{"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    text = FORMATS[name].write("f", {"x": value})
    assert FORMATS[name].parse(text, schemas).calls == [Call("f", {"x": read_as})]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "seed", "minimax"])
@pytest.mark.parametrize(
    ("kind", "value", "read_as"),
    [
        ("array", "[1, 2, 3]", [1, 2, 3]),
        ("array", "[{'a': 1}, \"b\", -2.5]", [{"a": 1}, "b", -2.5]),
        ("object", "{'a': {'b': (1, None)}}", {"a": {"b": [1, None]}}),
        ("array", "__import__('os').system('touch {marker}')", None),
        ("object", "{{'a': open('{marker}', 'w')}}", None),
        ("array", "[x for x in [open('{marker}', 'w')]]", None),
    ],
)
def test_what_python_would_read_is_read_and_never_run(name, kind, value, read_as, tmp_path):
    """The cases of verl's test of its parser for Qwen 3, whose first version ran the value."""
    marker = tmp_path / "marker"
    value = value.format(marker=marker) if read_as is None else value
    schemas = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": kind}}}}}]
    text = FORMATS[name].write("f", {"x": value})
    assert FORMATS[name].parse(text, schemas).calls == [Call("f", {"x": value if read_as is None else read_as})]
    assert not marker.exists()


def test_text_that_says_so_is_text_and_what_is_no_json_is_too():
    schemas = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "array"}}}}}]
    text = FORMATS["deepseek_v4"].write("f", {"x": "[1]", "y": [1], "z": "null"})
    assert FORMATS["deepseek_v4"].parse(text, schemas).calls == [Call("f", {"x": "[1]", "y": [1], "z": "null"})]
    damaged = text.replace(">[1]<", ">[1<")
    assert FORMATS["deepseek_v4"].parse(damaged, []).calls == [Call("f", {"x": "[1", "y": "[1", "z": "null"})]


def test_values_without_a_schema_are_text_for_qwen_and_json_for_others():
    for schemas in ([], [{"function": {"name": "f"}}], [{"function": {"name": "f", "parameters": {"properties": []}}}]):
        for name, read_as in (("qwen3_coder", "3"), ("glm", 3), ("seed", 3), ("minimax", 3)):
            text = FORMATS[name].write("f", {"x": "3"})
            assert FORMATS[name].parse(text, schemas).calls == [Call("f", {"x": read_as})]


def hostile(name):
    """Texts of up to 1 MB that are made to trip a reader."""
    written = FORMATS[name].write("look_up", {"text": "a", "rows": [[1]], "more": {"b": "c"}})
    opening, closing, end = marks(name)
    pieces = [opening, closing, end, written, written[: len(written) // 2], written[len(written) // 2 :], written[:20]]
    pieces += ["{", "[", "<", '"', "\\", " ", "\n", "\0", "🙂", "\ud800", '{"a":', "<tool_call>", "</tool_call>"]
    pieces += ["<think>"]
    pieces += ["<parameter=a>", "</parameter>", "<arg_key>a</arg_key><arg_value>", "</arg_value>", "9", "<|", "|>"]
    pieces += [
        '<invoke name="',
        '<invoke name="f">',
        '<parameter name="a">',
        "</invoke>",
        "<｜DSML｜",
        "<seed:tool_call>",
    ]
    pieces += ["<|channel|>commentary to=functions.f <|message|>", "[TOOL_CALLS]", '<|"|>', ";", "```json"]
    yield from pieces
    for piece in pieces:
        yield piece * (1_000_000 // len(piece))
        yield written[:-5] + piece * (500_000 // len(piece))
        yield opening + piece * 1000 + written + piece * 1000 + closing + written
    yield written * 100
    yield f"{written[:-10]}{'x' * 1_000_000}{written[-10:]}"


@every_format
def test_no_text_makes_a_parser_raise_or_wait(name):
    slowest = 0.0
    for text in hostile(name):
        began = time.perf_counter()
        parsed = read(name, text)
        slowest = max(slowest, time.perf_counter() - began)
        assert len(parsed.calls) + len(parsed.problems) <= MOST_CALLS + 1 or name in ("llama3_json", "mistral")
    # Milliseconds, mostly; a reader of quadratic time takes minutes.
    assert slowest < 2


@every_format
def test_random_marks_make_no_parser_raise(name):
    chance = np.random.default_rng(7)
    written = FORMATS[name].write("look_up", {"text": "a b", "rows": [1], "more": {}})
    opening, closing, end = marks(name)
    pieces = [written[i : i + 6] for i in range(0, len(written), 6)] + [written, opening, closing, end, "{", "}", '"']
    for _ in range(2000):
        read(name, "".join(chance.choice(pieces, chance.integers(1, 20))))
