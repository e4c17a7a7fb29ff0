"""Chat templates with the structure of real families, over a byte-level tokenizer trained on demand."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rltrain.data.chat import ChatEncoder

TEMPLATES = Path(__file__).parent / "templates"
# Added without being special, as Qwen has them.
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>", "\n\n"]
# The token that ends a turn; other special tokens; the call format of the template.
FAMILIES = {
    "hermes": (["<|im_end|>", "<|endoftext|>"], ["<|im_start|>", "<|image_pad|>"], "hermes"),
    "thinking": (["<|im_end|>", "<|endoftext|>"], ["<|im_start|>", "<|image_pad|>"], "hermes"),
    "coder": (["<|im_end|>", "<|endoftext|>"], ["<|im_start|>", "<|image_pad|>"], "qwen3_coder"),
    "llama": (
        ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
        "llama3_json",
    ),
    "glm": (
        ["<|user|>", "<|observation|>", "<|endoftext|>"],
        ["<|assistant|>", "<|system|>", "[gMASK]", "<sop>"],
        "glm",
    ),
    "harmony": (
        ["<|return|>", "<|call|>", "<|endoftext|>"],
        ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"],
        "gpt-oss",
    ),
    "deepseek": (
        ["<｜end▁of▁sentence｜>"],
        ["<｜begin▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
         "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
         "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"],
        "deepseek_v3",
    ),
    "kimi": (
        ["<|im_end|>"],
        ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
         "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
        "kimi",
    ),
    "mistral": (
        ["</s>"],
        ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
         "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
        "mistral",
    ),
    "gemma": (
        ["<turn|>", "<eos>"],
        ["<bos>", "<|turn>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'],
        "gemma4",
    ),
    "deepseek_v4": (
        ["<｜end▁of▁sentence｜>"],
        ["<｜begin▁of▁sentence｜>", "｜DSML｜", "<tool_result>", "</tool_result>"],
        "deepseek_v4",
    ),
    "seed": (
        ["<seed:eos>"],
        ["<seed:bos>", "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"],
        "seed",
    ),
    "minimax": (
        ["[e~["],
        ["]~!b[", "]~b]", "<minimax:tool_call>", "</minimax:tool_call>", "<response>", "</response>"],
        "minimax",
    ),
    "lfm": (["<|im_end|>"], ["<|im_start|>", "<|tool_response_start|>", "<|tool_response_end|>"], None),
    "counting": (["<|im_end|>"], ["<|im_start|>"], "hermes"),
}  # fmt: skip
FAMILIES["deepseek_once"] = FAMILIES["deepseek"]
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does something.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    }
    for name in ("look_up", "calculate")
]


@cache
def _trained():
    """Return the merges learned from the texts that templates and tools write."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.glob("*.jinja"))]
    texts += [json.dumps(SCHEMAS), "What is 3 + 4? The result is 42. Check it once more.\n\n \n" * 3]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def save_family(folder, name, template=None, tokenizer=None):
    """Save the folder of a family's model: tokenizer, template, stop tokens."""
    ends, special, _ = FAMILIES[name]
    core = tokenizer or Tokenizer.from_str(_trained())
    core.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    # As in DeepSeek V3, what opens a role need not be special.
    core.add_tokens([AddedToken(text, normalized=False) for text in ("<｜User｜>", "<｜Assistant｜>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=ends[0], pad_token="<pad>", additional_special_tokens=[*ends[1:], *special]
    )
    fast.chat_template = template or (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    fast.save_pretrained(folder)
    stops = [fast.convert_tokens_to_ids(text) for text in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return ChatEncoder(str(folder))
