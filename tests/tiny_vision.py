"""A vision-language model small enough to make in a test, with its processor (which needs torchvision)."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TOKENS = ["<pad>", "<eos>", *VISION_TOKENS, *"0123456789+-=? "]
START, END, IMAGE, VIDEO = (TOKENS.index(token) for token in VISION_TOKENS)
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_TEXT = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
    "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
_VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}
# The three parts of a head's rotation that follow time, height and width.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _config(family: str, tied: bool):
    if family == "qwen2_5_vl":
        text = {name: value for name, value in _TEXT.items() if name != "head_dim"} | {"rope_parameters": _ROPE}
        vision = _VISION | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_IDS)
    text = _TEXT | {"rope_parameters": _ROPE | {"mrope_interleaved": True}}
    vision = _VISION | {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_IDS)


def randomize(model, seed: int) -> None:
    """Weights that give distinct answers, among them placeholder tokens."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
        model.get_output_embeddings().weight[[IMAGE, VIDEO, START, END]] *= 3


def save_tiny_vision_model(folder: Path, family: str, *, tied: bool, seed: int = 0) -> Path:
    """Two layers of text and two of vision: family qwen2_5_vl or qwen3_vl."""
    config = _config(family, tied)
    model = AutoModelForImageTextToText.from_config(config)
    randomize(model, seed)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=VISION_TOKENS
    )
    fast.save_pretrained(folder)
    _processor(family, config.vision_config.patch_size, fast).save_pretrained(folder)
    return folder


def _processor(family: str, patch: int, tokenizer):
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    unit = (2 * patch) ** 2  # pixels of one token
    sizes = {"patch_size": patch, "merge_size": 2, "size": {"shortest_edge": unit, "longest_edge": 32 * unit}}
    images = Qwen2VLImageProcessor(**sizes)
    if family == "qwen2_5_vl":
        return Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(**sizes))
    return Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(**sizes))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
