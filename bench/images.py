"""Workload with images: a random Qwen2.5-VL in the proportions of the real ones, its processor, and drawings."""

from __future__ import annotations

import io
import random
from typing import Any

from PIL import Image, ImageDraw
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

# Size of an image: 11 x 8 tokens of 28 x 28 pixels.
WIDTH, HEIGHT, TOKENS = 308, 224, 88
_PATCH = 14
_START, _END, _IMAGE, _VIDEO = MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    + f"{_START}{_IMAGE}{_END}"
    + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_model(shape: Any, vocabulary: int, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """Return a model with as many layers in the tower as in the language model. Adds image tokens to the tokenizer."""
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE
    ids = tokenizer.convert_tokens_to_ids
    part = shape.hidden // shape.heads // 8
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [part, part + part // 2, part + part // 2]}
    text = {
        "vocab_size": vocabulary, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "rope_parameters": rope,
        "num_key_value_heads": max(shape.heads // 2, 1), "max_position_embeddings": 2048, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    # In the 3B: 1280 to 2048, and 3420 to 1280; windows of 112 pixels in all layers but a few.
    width = shape.hidden * 5 // 8
    vision = {
        "depth": shape.layers, "hidden_size": width, "intermediate_size": width * 8 // 3, "num_heads": shape.heads,
        "out_hidden_size": shape.hidden, "patch_size": _PATCH, "window_size": 112,
        "fullatt_block_indexes": [shape.layers - 1],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text, vision_config=vision, tie_word_embeddings=False, image_token_id=ids(_IMAGE),
            video_token_id=ids(_VIDEO), vision_start_token_id=ids(_START), vision_end_token_id=ids(_END),
        )
    )  # fmt: skip


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return the processor of Qwen2.5-VL (needs torchvision)."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    sizes = {"shortest_edge": 4 * (2 * _PATCH) ** 2, "longest_edge": 1280 * (2 * _PATCH) ** 2}
    images, videos = (kind(patch_size=_PATCH, size=sizes) for kind in (Qwen2VLImageProcessor, Qwen2VLVideoProcessor))
    return Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE)


def drawing(number: int) -> bytes:
    """Return a triangle with a circle, as a PNG file."""
    draw, image = random.Random(number), Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    corners = [(draw.randrange(WIDTH), draw.randrange(HEIGHT)) for _ in range(4)]
    pen.polygon(corners[:3], outline="black")
    pen.circle(corners[3], draw.randrange(10, 60), outline="black")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
