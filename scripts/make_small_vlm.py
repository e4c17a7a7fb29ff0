"""Create a small vision-language model to train on a CPU: 0.3 million random weights, with processor and tokenizer.

It has two text layers and two vision layers, and encodes an image of 84 x 84 pixels as 9 tokens. A token is a
character, and its texts are decoded with spaces between them: `3 9`. Nothing is downloaded; the same options give the
same folder. Its processor needs the packages pillow and torchvision.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Glm4vConfig,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "internvl", "glm4v")
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
VOCABULARY = ["<pad>", "<eos>", START, END, IMAGE, VIDEO, "<user>", "<assistant>", *"0123456789"]
VOCABULARY += [*"abcdefghijklmnopqrstuvwxyz", *" +-=.?"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}SLOT{{% elif part['type'] == 'video' %}}{START}{VIDEO}{END}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HIDDEN, HEAD, PATCH, MERGE, TILE = 64, 32, 14, 2, 84
# Weights of this size preserve the size of activations; those of large models (0.02) would hide the image from such a
# narrow model.
INITIALIZER_RANGE = 0.1


def build_config(family: str) -> PreTrainedConfig:
    """Return the configuration of a model of the family."""
    image, video, start, end = (VOCABULARY.index(token) for token in (IMAGE, VIDEO, START, END))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    text = {
        "vocab_size": len(VOCABULARY), "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2,
        "num_attention_heads": HIDDEN // HEAD, "num_key_value_heads": HIDDEN // HEAD, "max_position_embeddings": 512,
        "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "initializer_range": INITIALIZER_RANGE,
        "rope_parameters": rope,
    }  # fmt: skip
    vision = {"hidden_size": HIDDEN, "patch_size": PATCH, "initializer_range": INITIALIZER_RANGE}
    if family == "internvl":
        vision |= {"intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HIDDEN // HEAD}
        return InternVLConfig(
            text_config={"model_type": "qwen3", "head_dim": HEAD, **text},
            vision_config=vision | {"image_size": [TILE, TILE], "patch_size": [PATCH, PATCH]}, tie_word_embeddings=True,
            image_token_id=image, image_seq_length=(TILE // PATCH // MERGE) ** 2, vision_feature_layer=-1,
        )  # fmt: skip
    vision |= {"depth": 2, "num_heads": HIDDEN // HEAD}
    # Widths of the parts of a head that are rotated by time, height and width.
    rope["mrope_section"] = [4, 6, 6]
    ids = {"image_token_id": image, "video_token_id": video, "vision_start_token_id": start, "vision_end_token_id": end}
    if family == "qwen2_vl":
        vision |= {"embed_dim": HIDDEN, "mlp_ratio": 2}
        return Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    vision |= {"intermediate_size": 2 * HIDDEN, "out_hidden_size": HIDDEN}
    if family == "glm4v":
        # vLLM reads attention_bias; in transformers the projections always have a bias.
        text |= {"head_dim": HEAD, "attention_bias": True}
        rope["partial_rotary_factor"] = 1.0
        ids |= {"image_start_token_id": start, "image_end_token_id": end, "video_start_token_id": video}
        return Glm4vConfig(
            text_config=text, vision_config=vision | {"image_size": TILE}, tie_word_embeddings=True,
            video_end_token_id=video, **ids,
        )  # fmt: skip
    if family == "qwen2_5_vl":
        vision |= {"window_size": 2 * MERGE * PATCH, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    rope["mrope_interleaved"] = True
    vision["num_position_embeddings"] = 64
    text["head_dim"] = HEAD
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
    if family.startswith("qwen3_5"):
        # Heads of 128, because vLLM's kernel for a CPU requires them.
        text |= {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        }  # fmt: skip
        rope["partial_rotary_factor"] = 1.0
        if family == "qwen3_5":
            return Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
        text |= experts | {"shared_expert_intermediate_size": HIDDEN}
        return Qwen3_5MoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    vision["deepstack_visual_indexes"] = [0]
    if family == "qwen3_vl_moe":
        # The published config.json has the last key: vLLM reads it, and transformers assumes it.
        text |= experts | {"norm_topk_prob": True}
        return Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def build_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character.

    It has only the characters of the generated tasks, so that a random model sometimes hits a digit. InternVL's
    processor writes the tokens around an image itself; Qwen's needs them in the chat template.
    """
    tokenizer = Tokenizer(models.WordLevel({each: number for number, each in enumerate(VOCABULARY)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>",
        extra_special_tokens={
            "start_image_token": START, "end_image_token": END, "context_image_token": IMAGE, "image_token": IMAGE,
            "video_token": VIDEO, "user_token": "<user>", "assistant_token": "<assistant>",
        },
        chat_template=CHAT_TEMPLATE.replace("SLOT", IMAGE if family == "internvl" else START + IMAGE + END),
    )  # fmt: skip


def build_processor(family: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return a processor for pixels and placeholders, as the real models of the family have."""
    template = tokenizer.chat_template
    if family == "internvl":
        size = {"height": TILE, "width": TILE}
        tiles, tokens = GotOcr2ImageProcessor(size=size, crop_to_patches=False), (TILE // PATCH // MERGE) ** 2
        video = InternVLVideoProcessor(size=size)
        return InternVLProcessor(tiles, tokenizer, video, image_seq_length=tokens, chat_template=template)
    unit = (MERGE * PATCH) ** 2  # pixels per token
    sizes = {"patch_size": PATCH, "merge_size": MERGE, "size": {"shortest_edge": unit, "longest_edge": 64 * unit}}
    if family == "glm4v":
        sizes["size"] = {"shortest_edge": 2 * unit, "longest_edge": 2 * 64 * unit}  # an image counts as two frames
        parts = (Glm4vImageProcessor(**sizes), tokenizer, Glm4vVideoProcessor(**sizes))
        return Glm4vProcessor(*parts, chat_template=template)
    kinds = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}
    video = (Qwen2VLVideoProcessor if family in kinds else Qwen3VLVideoProcessor)(**sizes)
    return kinds.get(family, Qwen3VLProcessor)(Qwen2VLImageProcessor(**sizes), tokenizer, video, chat_template=template)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--family", choices=FAMILIES, default="qwen2_5_vl", help="family of the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    tokenizer, model = (
        build_tokenizer(options.family),
        AutoModelForImageTextToText.from_config(build_config(options.family)),
    )
    build_processor(options.family, tokenizer).save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    text = f"<user>{IMAGE}area=?<assistant>9<eos>"
    if AutoTokenizer.from_pretrained(options.output).encode(text) != tokenizer.encode(text):
        sys.exit("error: the tokenizer changes when it is saved and loaded.")
    model.save_pretrained(options.output)  # written last, so that a folder with a config.json is complete
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.output}: {options.family}, {parameters / 1e6:.2f} million random parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
