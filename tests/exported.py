"""Write a policy as a Hugging Face folder, and adapters as peft's files, in one call."""

from pathlib import Path

import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from rltrain.data.chat import ChatEncoder
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.export import Export
from rltrain.models.weights.lora import adapter_weights, write_adapter


def export_huggingface(
    policy: PolicyModel, config: PretrainedConfig, encoder: ChatEncoder, folder: str, card: str = ""
) -> list[str]:
    """Write the folder in one call (a collective). Returns its problems, on rank 0."""
    export = Export(policy, config, encoder)
    export.gather()
    problems = export.write(Path(folder), card, {}) if dist.get_rank() == 0 else []
    dist.barrier()
    return problems


def save_adapter(model: PreTrainedModel, base: str, folder: str) -> None:
    """Write adapters of ``base`` in one call (a collective)."""
    weights = adapter_weights(model)
    if dist.get_rank() == 0:
        write_adapter(model, weights, base, folder, {})
    dist.barrier()
