"""The model families and the formats of their calls."""

from rltrain.data.turns.formats.gemma4 import Gemma
from rltrain.data.turns.formats.notations import NAME, Json, Tags
from rltrain.data.turns.formats.scan import Family

_TAGS = "<tool_call>\n{}\n</tool_call>"

HERMES = Family("hermes", Json(), _TAGS)
LLAMA3_JSON = Family(
    "llama3_json", Json('{"name": "NAME", "parameters": ARGUMENTS}'), optional="<|python_tag|>", stop=("<|eom_id|>",)
)
# Calls are a list of objects. Newer models write a name and the arguments instead.
MISTRAL = Family(
    "mistral",
    Json(
        '[{"name": "NAME", "arguments": ARGUMENTS}]',
        rf'\s*(?P<name>{NAME}?)(?:\[CALL_ID\](?P<id>\w{{1,50}}))?(?:\[ARGS\])?(?=\s*[{{"])',
        inner=("[CALL_ID]", "[ARGS]"),
    ),
    "[TOOL_CALLS]{}",
    thinking="[THINK]{}[/THINK]",
)
# V3 and R1 write the arguments in a code block; V3.1 does not.
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    Json(
        "function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```",
        rf"\s*(?:function<｜tool▁sep｜>)?(?P<name>{NAME})\s*(?:<｜tool▁sep｜>|\n)\s*(?:```(?:json)?)?",
        tail=r"\s*(?:```)?",
        inner=("<｜tool▁sep｜>",),
    ),
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
# The id of a call contains the name of the tool.
KIMI = Family(
    "kimi",
    Json(
        "functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS",
        rf"\s*(?P<id>(?:functions\.)?(?P<name>{NAME}?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
        inner=("<|tool_call_argument_begin|>",),
    ),
    "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
)
QWEN3_CODER = Family(
    "qwen3_coder", Tags("<function=NAME>", "<parameter=KEY>\nVALUE\n</parameter>", "</function>", "string"), _TAGS
)
SEED = Family(
    "seed",
    Tags("<function=NAME>", "<parameter=KEY>VALUE</parameter>", "</function>"),
    "<seed:tool_call>\n{}\n</seed:tool_call>",
    thinking="<seed:think>{}</seed:think>",
)
GLM = Family(
    "glm",
    Tags("<tool_call>NAME", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>", "</tool_call>"),
    stop=("<|observation|>",),
)
MINIMAX = Family(
    "minimax",
    Tags('<invoke name="NAME">', '<parameter name="KEY">VALUE</parameter>', "</invoke>"),
    "<minimax:tool_call>\n{}\n</minimax:tool_call>",
)
DEEPSEEK_V4 = Family(
    "deepseek_v4",
    Tags(
        '<｜DSML｜invoke name="NAME">',
        '<｜DSML｜parameter name="KEY" string="KIND">VALUE</｜DSML｜parameter>',
        "</｜DSML｜invoke>",
    ),
    "<｜DSML｜tool_calls>\n{}\n</｜DSML｜tool_calls>",
)
GEMMA4 = Family(
    "gemma4", Gemma(), "<|tool_call>{}<tool_call|>", thinking="<|channel>thought{}<channel|>", stop=("<tool_call|>",)
)
NO_CALLS = Family("none", Json(bare="")).format
"""For environments and agents without tools."""
