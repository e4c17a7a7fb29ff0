"""A policy as a Hugging Face folder, at once."""

from pathlib import Path

import torch.distributed as dist
from transformers import PretrainedConfig

from rltrain.data.chat import ChatEncoder
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.export import Export


def export_huggingface(
    policy: PolicyModel, config: PretrainedConfig, encoder: ChatEncoder, folder: str, card: str = ""
) -> list[str]:
    """Write the folder at once (a collective). Returns its problems, on rank 0."""
    export = Export(policy, config, encoder)
    export.gather()
    problems = export.write(Path(folder), card, {}) if dist.get_rank() == 0 else []
    dist.barrier()
    return problems
