"""Sharded policy -> a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PretrainedConfig

from rltrain.models.forward import PolicyModel
from rltrain.models.load import empty_model, source_dtype
from rltrain.models.shard import named_weights

# What tokenizers, processors, chat templates and generation configs are made of.
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}
_WRITTEN_HERE = {"config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"}


def export_huggingface(policy: PolicyModel, config: PretrainedConfig, source: str, folder: str) -> None:
    """Gather the weights on rank 0 and write them in the source checkpoint's dtype (a collective).

    Tokenizer, chat template and generation config are copied from ``source`` byte for byte when it is a local folder.
    """
    dtype = source_dtype(config)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in named_weights(policy):
        if dist.get_rank() == 0:
            weights[name] = tensor.to("cpu", dtype)
    if dist.get_rank() == 0:
        model = empty_model(config, "sdpa", dtype)
        model.save_pretrained(
            folder, state_dict={name: weights[name] for name in model.state_dict() if name in weights}
        )
        _copy_tokenizer(source, Path(folder))
    dist.barrier()


def _copy_tokenizer(source: str, folder: Path) -> None:
    if not Path(source).is_dir():
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        return
    for file in sorted(Path(source).iterdir()):
        if file.is_file() and file.suffix in _COPIED_SUFFIXES and file.name not in _WRITTEN_HERE:
            shutil.copy2(file, folder / file.name)
