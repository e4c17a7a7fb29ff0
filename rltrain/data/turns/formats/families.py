"""The model families and the formats of their calls."""

from rltrain.data.turns.formats.gemma4 import Gemma
from rltrain.data.turns.formats.notations import NAME, Json, Tags
from rltrain.data.turns.formats.scan import Family

_TAGS = ("<tool_call>",), ("</tool_call>",), "\n"
_FUNCTION = "<function=NAME>", "<parameter=KEY>", "</parameter>", "</function>"

HERMES = Family("hermes", Json(), *_TAGS)
QWEN3_CODER = Family("qwen3_coder", Tags(*_FUNCTION, border="\n", otherwise="string"), *_TAGS)
SEED = Family(
    "seed", Tags(*_FUNCTION), ("<seed:tool_call>",), ("</seed:tool_call>",), "\n", ("<seed:think>", "</seed:think>")
)
LLAMA3_JSON = Family(
    "llama3_json",
    Json('{"name": "NAME", "parameters": ARGUMENTS}'),
    others=("<|python_tag|>",),
    stop_tokens=("<|eom_id|>",),
)
GLM = Family(
    "glm",
    Tags("<tool_call>NAME", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>"),
    stop_tokens=("<|observation|>",),
)
MINIMAX = Family(
    "minimax",
    Tags('<invoke name="NAME">', '<parameter name="KEY">', "</parameter>", "</invoke>"),
    *(("<minimax:tool_call>",), ("</minimax:tool_call>",), "\n"),
)
DEEPSEEK_V4 = Family(  # V3.2 and V4.1 have other names for the block
    "deepseek_v4",
    Tags(
        *('<｜DSML｜invoke name="NAME">', '<｜DSML｜parameter name="KEY" string="KIND">'),
        *("</｜DSML｜parameter>", "</｜DSML｜invoke>"),
    ),
    *(("<｜DSML｜tool_calls>",), ("</｜DSML｜tool_calls>",), "\n"),
    others=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "<｜DSML｜calls>", "</｜DSML｜calls>"),
)
MISTRAL = Family(  # a list of objects; newer models write a name and the arguments
    "mistral",
    Json(
        '[{"name": "NAME", "arguments": ARGUMENTS}]',
        rf'\s*(?P<name>{NAME}?)(?:\[CALL_ID\](?P<id>\w{{1,50}}))?(?:\[ARGS\])?(?=\s*[{{"])',
        inner=("[CALL_ID]", "[ARGS]"),
    ),
    ("[TOOL_CALLS]",),
    thinking=("[THINK]", "[/THINK]"),
)
DEEPSEEK_V3 = Family(  # V3 and R1 write the arguments in a block of code; V3.1 does not
    "deepseek_v3",
    Json(
        "function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```",
        rf"\s*(?:function<｜tool▁sep｜>)?(?P<name>{NAME})\s*(?:<｜tool▁sep｜>|\n)\s*(?:```(?:json)?)?",
        *(r"\s*(?:```)?", ("<｜tool▁sep｜>",)),
    ),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
KIMI = Family(  # the id holds the name
    "kimi",
    Json(
        "functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS",
        rf"\s*(?P<id>(?:functions\.)?(?P<name>{NAME}?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
        inner=("<|tool_call_argument_begin|>",),
    ),
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
GEMMA4 = Family(
    *("gemma4", Gemma(), ("<|tool_call>",), ("<tool_call|>",)),
    thinking=("<|channel>thought", "<channel|>"),
    stop_tokens=("<tool_call|>",),
)
NO_CALLS = Family("none", Json(bare="")).format
"""For environments and agents without tools."""
