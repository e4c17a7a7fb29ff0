"""Vision-language models that are small enough to create in a test, with their processors (which need torchvision)."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Glm4vConfig,
    InternVLConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# vLLM looks these up for GLM-4.1V.
VIDEO_TOKENS = ["<|begin_of_video|>", "<|end_of_video|>", "<|video|>"]
TOKENS = ["<pad>", "<eos>", *VISION_TOKENS, *"0123456789+-=? ", "<user>", "<assistant>", *VIDEO_TOKENS]
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "qwen3_5", "glm4v"]
# Families whose decoder has experts.
WITH_EXPERTS = ["qwen3_vl_moe", "qwen3_5_moe"]
# As those of the real models: content is a text, or a list of parts, each a text or an image.
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER{% elif part['type'] == 'video' %}VIDEO{% else %}{{ part['text'] }}"
    "{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
START, END, IMAGE, VIDEO = (TOKENS.index(token) for token in VISION_TOKENS)
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_TEXT = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
    "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
_VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}
# A gated delta net.
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
# The three parts of a head's rotation that follow time, height and width.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _config(family: str, tied: bool, heads: int, kv_heads: int, positions: int):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 32 * heads}
    of_text = _TEXT | sizes | {"max_position_embeddings": positions}
    of_tower = _VISION | {"out_hidden_size": 32 * heads}
    if family == "internvl":
        vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": [56, 56], "patch_size": [14, 14], "attention_dropout": 0.1}
        text = {"model_type": "qwen3", **of_text, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        return InternVLConfig(
            text_config=text, vision_config=vision, tie_word_embeddings=tied, image_token_id=IMAGE, image_seq_length=4,
            vision_feature_layer=-1,
        )  # fmt: skip
    text = {name: value for name, value in of_text.items() if name != "head_dim"} | {"rope_parameters": _ROPE}
    if family == "qwen2_vl":
        vision = {
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 32 * heads,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 14,
        }
        return Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_IDS)
    if family == "glm4v":
        rope = _ROPE | {"partial_rotary_factor": 1.0}
        # vLLM reads the last key; in transformers the projections always have a bias.
        text = of_text | {"rope_parameters": rope, "attention_bias": True}
        vision = of_tower | {"patch_size": 14, "image_size": 56}
        edges = {"image_start_token_id": START, "image_end_token_id": END}
        start, end, _ = map(TOKENS.index, VIDEO_TOKENS)
        edges |= {"video_start_token_id": start, "video_end_token_id": end}
        return Glm4vConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_IDS, **edges)
    if family == "qwen2_5_vl":
        vision = of_tower | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_IDS)
    text = of_text | {"rope_parameters": _ROPE | {"mrope_interleaved": True}}
    vision = of_tower | {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if family.startswith("qwen3_5"):
        del vision["deepstack_visual_indexes"]
        text |= {"head_dim": 64, "layer_types": ["linear_attention", "full_attention"], **_DELTA}
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5}
        if family == "qwen3_5":
            return Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_IDS)
        text |= experts | {"shared_expert_intermediate_size": 24}
        return Qwen3_5MoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_IDS)
    if family == "qwen3_vl_moe":
        # The published config.json has this key, which vLLM reads and transformers ignores.
        text |= experts | {"norm_topk_prob": True}
        return Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_IDS)
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_IDS)


def randomize(model, seed: int) -> None:
    """Set random weights that give distinct responses, some with placeholder tokens."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
        model.get_output_embeddings().weight[[IMAGE, VIDEO, START, END]] *= 3


def save_tiny_vision_model(
    folder: Path, family: str, *, tied: bool, seed: int = 0, heads: int = 2, kv_heads: int = 1, positions: int = 512
) -> Path:
    """Save a model with two text layers and two vision layers. family: one of FAMILIES or WITH_EXPERTS."""
    config = _config(family, tied, heads, kv_heads, positions)
    model = AutoModelForImageTextToText.from_config(config)
    randomize(model, seed)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>",
        extra_special_tokens={
            "start_image_token": VISION_TOKENS[0], "end_image_token": VISION_TOKENS[1],
            "context_image_token": VISION_TOKENS[2], "image_token": VISION_TOKENS[2], "video_token": VISION_TOKENS[3],
            "user_token": "<user>", "assistant_token": "<assistant>",
        },
    )  # fmt: skip
    # InternVL's processor writes the tokens around an image itself.
    placeholder = VISION_TOKENS[2] if family == "internvl" else "".join(VISION_TOKENS[each] for each in (0, 2, 1))
    video = "".join(VISION_TOKENS[each] for each in (0, 3, 1))
    fast.chat_template = TEMPLATE.replace("PLACEHOLDER", placeholder).replace("VIDEO", video)
    _processor(family, config.vision_config.patch_size, fast).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def save_tiny_families(factory) -> dict[str, str]:
    """Save a model folder for each family, one of them with tied embeddings. factory: pytest's tmp_path_factory."""
    return {
        family: str(save_tiny_vision_model(factory.mktemp(family), family, tied=family == "qwen3_vl"))
        for family in (*FAMILIES, *WITH_EXPERTS)
    }


def _processor(family: str, patch: int, tokenizer):
    from transformers import (
        Glm4vImageProcessor,
        Glm4vProcessor,
        Glm4vVideoProcessor,
        GotOcr2ImageProcessor,
        InternVLProcessor,
        InternVLVideoProcessor,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    template = tokenizer.chat_template
    if family == "internvl":
        size = {"height": 56, "width": 56}
        images = GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4)
        video = InternVLVideoProcessor(size=size)
        return InternVLProcessor(images, tokenizer, video, image_seq_length=4, chat_template=template)

    unit = (2 * patch) ** 2  # pixels of one token
    sizes = {"patch_size": patch, "merge_size": 2, "size": {"shortest_edge": unit, "longest_edge": 32 * unit}}
    if family == "glm4v":
        sizes["size"] = {edge: 2 * pixels for edge, pixels in sizes["size"].items()}
        parts = (Glm4vImageProcessor(**sizes), tokenizer, Glm4vVideoProcessor(**sizes))
        return Glm4vProcessor(*parts, chat_template=template)
    images = Qwen2VLImageProcessor(**sizes)
    kinds = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}
    video = Qwen2VLVideoProcessor if family in kinds else Qwen3VLVideoProcessor
    return kinds.get(family, Qwen3VLProcessor)(images, tokenizer, video(**sizes), chat_template=template)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_pictures(file: Path, rows: range, *, videos: bool = False) -> Path:
    """Write prompts with one image, with two, and with text only, in verl's schema. videos: with a video of four frames
    instead of the first image."""
    records = []
    for row in rows:
        count = row % 3
        pictures = [picture(60 + 30 * number, 30 + 28 * (row % 2), seed=row + number) for number in range(count)]
        records.append({
            "data_source": "rltrain/arithmetic",
            "prompt": [{"role": "user", "content": "<image>" * count + f"{row % 7}+{row % 4}=?"}],
            "images": [{"bytes": png_of(each)} for each in pictures],
            "reward_model": {"style": "rule", "ground_truth": str(row % 7 + row % 4)},
            "extra_info": {"index": row},
        })  # fmt: skip
        if videos:
            frames = [{"bytes": png_of(picture(60, 90, seed=row + step))} for step in range(4)] if count else []
            records[-1]["videos"] = [{"video": frames, "fps": 8.0}] * min(count, 1)
            records[-1]["images"] = records[-1]["images"][1:]
            records[-1]["prompt"][0]["content"] = records[-1]["prompt"][0]["content"].replace("<image>", "<video>", 1)
    pq.write_table(pa.Table.from_pylist(records), file)
    return file


def png_of(image: Image.Image) -> bytes:
    """Return a PNG file."""
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
