"""Formats of tool calls in a turn of the policy."""

from rltrain.data.turns.formats import families as of
from rltrain.data.turns.formats.harmony import GPT_OSS
from rltrain.data.turns.formats.reading import Call, CallFormat, Parsed

__all__ = ["FORMATS", "Call", "CallFormat", "Parsed"]

# Llama's comes first, because others read JSON without marks, too (`detect.detect_format`).
_ALL = (
    of.LLAMA3_JSON, of.HERMES, of.QWEN3_CODER, of.GLM, of.DEEPSEEK_V3, of.DEEPSEEK_V4, of.KIMI, of.MISTRAL, of.GEMMA4,
    of.SEED, of.MINIMAX,
)  # fmt: skip
FORMATS = {item.name: item for item in (*(family.format for family in _ALL), GPT_OSS)}
"""Formats by name. The names are those of verl's ``multi_turn.format``, where it has the format."""
