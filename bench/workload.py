"""The workload for comparing trainers: prompts, and a random model whose weights determine the lengths of responses.

That needs no sampling rule and no code of rltrain, so any trainer does the same work with the same files. Every layer
leaves two directions of the residual stream unchanged: one is constant, the other encodes whether the last token
belongs to the first or the second half of the vocabulary. The head reads them, which gives a Markov chain over {first
half, second half, end}:

* ``equal``: the end token is never reached; every response has the length of the limit.
* ``long_tail``: most responses end soon (1 in 24 tokens ends), a quarter enters the second half and stays there
  (1 in 170 ends): lengths of about 64 on average, with a tail to the limit of 512.
* ``images``: as ``equal``, by a Qwen2.5-VL, with an image before every prompt (`bench/images.py`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bench import images
from scripts.make_small_model import ASSISTANT, END, build_tokenizer

PROMPTS, ANSWERS, VOCABULARY = 32, 8, 1024
LIMITS = {"equal": 128, "long_tail": 512, "images": 128}
_SIZE = 20.0  # size of the two directions; numbers in the other directions are about 1
_NEVER = -40.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    hidden: int
    layers: int
    intermediate: int
    heads: int = 4


SHAPES = {"tiny": Shape(256, 4, 768), "medium": Shape(512, 8, 1536, 8), "test": Shape(32, 2, 64, 1)}


def make(folder: Path, kind: str, shape: str, steps: int) -> None:
    """Create ``model/`` and ``train.parquet`` (enough prompts for ``steps`` steps) in ``folder``."""
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = 2048
    torch.manual_seed(0)
    size, with_images = SHAPES[shape], kind == "images"
    model = images.make_model(size, VOCABULARY, tokenizer) if with_images else make_model(size, tokenizer)
    ids = tokenizer.convert_tokens_to_ids
    steer(model, ids(END), ids(ASSISTANT), kind, ids(images.MARKS) if with_images else [])
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder / "model")
    (images.make_processor(tokenizer) if with_images else tokenizer).save_pretrained(folder / "model")
    write_prompts(folder / "train.parquet", PROMPTS * steps, with_images=with_images)
    again = AutoTokenizer.from_pretrained(folder / "model")
    prompt = prompts(1)[0]
    assert again(prompt).input_ids == tokenizer(prompt).input_ids, "the saved tokenizer cuts text in another way"


def make_model(size: Shape, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a model for texts."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=size.hidden, intermediate_size=size.intermediate,
            num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=max(size.heads // 2, 1),
            head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        )
    )  # fmt: skip


@torch.no_grad()
def steer(model: PreTrainedModel, end: int, last_of_prompt: int, kind: str, never: Sequence[int] = ()) -> None:
    """Set embeddings and head as the module describes. The last token of a prompt counts as one of the first half.

    never: tokens that no response contains.
    """
    middle = VOCABULARY // 2
    second = torch.arange(VOCABULARY) >= middle
    second[last_of_prompt] = False
    language = getattr(model.model, "language_model", model.model)
    embedding, head = language.embed_tokens.weight, model.lm_head.weight
    embedding.normal_(0, 1)
    embedding[:, 0] = _SIZE
    embedding[:, 1] = torch.where(second, _SIZE, -_SIZE)
    for layer in language.layers:
        layer.self_attn.o_proj.weight[:2] = 0
        layer.mlp.down_proj.weight[:2] = 0
    head[:, :2] = 0
    # After the last norm both directions have about this size, regardless of the rest.
    scale = _SIZE / math.sqrt(2 * _SIZE**2 / embedding.shape[1] + 1)

    def read(in_first: float, in_second: float) -> torch.Tensor:
        """Return the head's weights so that a logit is in_first or in_second, by the half of the last token."""
        return torch.tensor([(in_first + in_second) / 2, (in_second - in_first) / 2]) / scale

    if kind == "long_tail":
        stay = math.log(middle)
        head[second, :2] = read(-math.log(60), 8.0)
        head[end] = 0
        head[end, :2] = read(stay - math.log(24), stay + 8.0 - math.log(170))
    else:
        never = [*never, end]
    for token in never:
        head[token] = 0
        head[token, :2] = read(_NEVER, _NEVER)


def prompts(count: int, terms: int = 5) -> list[str]:
    """Return sums of numbers, all of one length: about 7 tokens per term and 25 more."""
    draw = random.Random(0)
    sums = [" + ".join(str(draw.randint(1000, 9999)) for _ in range(terms)) for _ in range(count)]
    return [f"Add these numbers: {total} = ?" for total in sums]


def write_prompts(file: Path, count: int, terms: int = 5, *, with_images: bool = False) -> None:
    """Write a file in verl's schema."""
    rows = [
        {
            "data_source": "bench",
            "prompt": [{"role": "user", "content": "<image>" * with_images + text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": number},
        }
        | ({"images": [{"bytes": images.drawing(number)}]} if with_images else {})
        for number, text in enumerate(prompts(count, terms))
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
