"""A checkpoint of zeros that takes no space on the disk: a header, and a hole of the right length."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig


def write_zeros(config: PretrainedConfig, folder: Path) -> int:
    """Write a Hugging Face folder in bf16, without a tokenizer. Return the bytes of its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header, end = {}, 0
    for name, weight in model.named_parameters():  # tied weights appear once
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [end, end + weight.nbytes]}
        end += weight.nbytes
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config.save_pretrained(folder)
    return end
