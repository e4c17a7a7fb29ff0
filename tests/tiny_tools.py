"""A random model that calls tools: one of its tokens is a complete call and ends a turn."""

import json
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SPECIALS = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
VOCABULARY = [*SPECIALS, CALL, *string.printable[:95], "\n"]
CALL_ID, END_ID = VOCABULARY.index(CALL), VOCABULARY.index("<|im_end|>")
# Structured as Qwen's: results of a turn share one message of the user.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = '''
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One of them.
        b: The other.
    """
    return str(a + b)
'''


def save_calling_tokenizer(folder: Path, call: str = CALL) -> None:
    """Save a tokenizer with one token per character, one for the complete ``call``, and a template with tools."""
    vocabulary = {call if id == CALL_ID else token: id for id, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def save_calling_model(
    folder: Path, seed: int = 0, call: str = CALL, heads: int = 2, kv_heads: int = 1, positions: int = 1024,
    experts: bool = False,
) -> Path:  # fmt: skip
    """A random two-layer Qwen3."""
    save_calling_tokenizer(folder, call)
    of_experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if experts else {}
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        vocab_size=len(VOCABULARY), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=32, max_position_embeddings=positions,
        tie_word_embeddings=False, eos_token_id=END_ID, pad_token_id=0, bos_token_id=None, initializer_range=0.2,
        **of_experts,
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_ID, CALL_ID]}))
    return folder


def tool_run(model: Path, folder: Path, code: str = TOOLS) -> dict[str, object]:
    """Return the changes to `small_run` with which responses have room for several turns, and call the tools of
    ``code``."""
    (folder / "tools.py").write_text(code)
    return {
        "actor_rollout_ref__model__path": model,
        "data__max_response_length": 400,
        "data__max_prompt_length": 120,
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 1100,
        "actor_rollout_ref__rollout__multi_turn__function_tool_path": folder / "tools.py",
    }
