"""Calls in a turn of the policy, in the format of its family."""

from rltrain.data.turns.formats.deepseek import DEEPSEEK_V3
from rltrain.data.turns.formats.deepseek_v4 import DEEPSEEK_V4
from rltrain.data.turns.formats.gemma4 import GEMMA4
from rltrain.data.turns.formats.glm import GLM
from rltrain.data.turns.formats.gpt_oss import GPT_OSS
from rltrain.data.turns.formats.hermes import HERMES
from rltrain.data.turns.formats.kimi import KIMI
from rltrain.data.turns.formats.llama3_json import LLAMA3_JSON
from rltrain.data.turns.formats.minimax import MINIMAX
from rltrain.data.turns.formats.mistral import MISTRAL
from rltrain.data.turns.formats.qwen3_coder import QWEN3_CODER
from rltrain.data.turns.formats.reading import Call, CallFormat, Parsed
from rltrain.data.turns.formats.seed import SEED

__all__ = ["FORMATS", "Call", "CallFormat", "Parsed"]

_ALL = (
    HERMES, QWEN3_CODER, LLAMA3_JSON, GLM, GPT_OSS, DEEPSEEK_V3, DEEPSEEK_V4, KIMI, MISTRAL, GEMMA4, SEED, MINIMAX,
)  # fmt: skip
FORMATS = {each.name: each for each in _ALL}
"""By the names that verl's ``multi_turn.format`` has for them, where it has one."""
