"""Formats of tool calls in a turn of the policy."""

from rltrain.data.turns.formats import families as of
from rltrain.data.turns.formats.harmony import GPT_OSS
from rltrain.data.turns.formats.reading import Call, CallFormat, Parsed

__all__ = ["FORMATS", "Call", "CallFormat", "Parsed"]

# Llama's format is first, so that `detect.detect_format` prefers it: parsers of other formats also read JSON without
# marks.
_ALL = (
    of.LLAMA3_JSON, of.HERMES, of.QWEN3_CODER, of.GLM, of.DEEPSEEK_V3, of.DEEPSEEK_V4, of.KIMI, of.MISTRAL, of.GEMMA4,
    of.SEED, of.MINIMAX,
)  # fmt: skip
FORMATS = {item.name: item for item in (*(family.format for family in _ALL), GPT_OSS)}
"""Formats by name. For formats in verl, its names of ``multi_turn.format`` are used."""
