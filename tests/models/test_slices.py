"""Slices of checkpoint files equal what transformers reads, and no rank holds more than its own."""

import itertools
import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from bench.zeros import write_zeros
from rltrain.common.device import get_device
from rltrain.config.schema.model import ShardingConfig
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.slices import NotSliceable, SlicedCheckpoint
from rltrain.models.weights.spec import ModelSpec
from tests.ranks import run_on_ranks
from tests.tiny_vision import FAMILIES as VISION
from tests.tiny_vision import _config

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 67, "max_position_embeddings": 64, "head_dim": 16, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
CONFIGS = {
    "qwen2_tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=5),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5),
    # Its routers have a buffer that is in the files.
    "deepseek": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 2}, **EXPERTS, **LATENT, n_routed_experts=4, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    ),
    **{family: _config(family, family == "qwen3_vl", 2, 1, 64) for family in VISION},
}  # fmt: skip


def made(config: PreTrainedConfig, folder: Path, kind=None):
    """Return a saved model, and the class that reads it."""
    kind = kind or (AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM)
    torch.manual_seed(0)
    model = kind.from_config(config)
    with torch.no_grad():
        for tensor in [
            *model.parameters(),
            *(buffer for buffer in model.buffers() if buffer.dim() == 1 and not buffer.any()),
        ]:
            tensor.copy_(torch.randn_like(tensor))
    # Two files at least, with an index.
    model.save_pretrained(folder, max_shard_size=sum(parameter.nbytes for parameter in model.parameters()) // 2)
    return kind


@pytest.mark.parametrize("decoder_only", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize("family", CONFIGS)
def test_rows_are_those_that_transformers_reads(family, decoder_only, tmp_path):
    kind = made(CONFIGS[family], tmp_path)
    kind = AutoModel if decoder_only else kind
    config = AutoConfig.from_pretrained(tmp_path)
    expected = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.device("meta"):
        plain = kind.from_config(config, dtype=torch.bfloat16)
    found = SlicedCheckpoint(str(tmp_path), plain)
    for name, weight in expected.named_parameters():
        cuts = [0, len(weight) // 3, len(weight) // 2, len(weight), len(weight)]
        pieces = [found.rows(name, *cut, torch.bfloat16) for cut in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat([piece.bfloat16() for piece in pieces]), weight), name
    buffers = dict(expected.named_buffers())
    assert buffers.keys() == found.buffers.keys()
    assert all(torch.equal(found.buffers[name], each) for name, each in buffers.items())


def as_one_of_many(_rank: int, _world: int, function: str, rank: int, world: int, *args) -> None:
    """Call a function of this file as one rank of a group whose collectives return at once."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    globals()[function](*args)


def shards(kind, folder: Path, name: str, **spec) -> torch.Tensor:
    model = sharded_model(kind, ModelSpec(str(folder), **spec), get_device("cpu"))
    return dict(model.named_parameters())[name].to_local()


def check_shards(folder: Path) -> None:
    embedding = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    name = "model.model.embed_tokens.weight"
    # 67 rows over 4 ranks: 17, 17, 17, 16.
    assert torch.equal(shards(PolicyModel, folder, name), embedding[51:])
    # Two replicas of two shards.
    assert torch.equal(shards(PolicyModel, folder, name, fsdp=ShardingConfig(fsdp_size=2)), embedding[34:])
    assert torch.equal(shards(ScalarModel, folder, "model.embed_tokens.weight"), embedding[51:])
    assert shards(ScalarModel, folder, "score.weight").shape == (0, 32)


def test_a_rank_gets_its_rows(tmp_path):
    made(CONFIGS["qwen2_tied"], tmp_path)
    run_on_ranks(as_one_of_many, 1, "check_shards", 3, 4, tmp_path)


def whole(_rank: int, _world: int, folder: Path, expected: Path) -> None:
    model = sharded_model(PolicyModel, ModelSpec(str(folder)), get_device("cpu"))
    reference = AutoModelForCausalLM.from_pretrained(expected)
    for name, weight in reference.named_parameters():
        assert torch.equal(dict(model.named_parameters())[f"model.{name}"].full_tensor(), weight), name


def test_what_cannot_be_sliced_rank_0_hands_out(tmp_path):
    made(CONFIGS["qwen2_tied"], tmp_path / "model")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    weights = {name: each for file in files for name, each in load_file(file).items()}
    for file in [*files, tmp_path / "model" / "model.safetensors.index.json"]:
        file.unlink()
    torch.save(weights, tmp_path / "model" / "pytorch_model.bin")
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
    with pytest.raises(NotSliceable, match=r"its files are not safetensors"):
        SlicedCheckpoint(str(tmp_path / "model"), plain)
    run_on_ranks(whole, 2, tmp_path / "model", tmp_path / "model")


# -- host memory -------------------------------------------------------------------------------------------------------

QWEN_7B = Qwen2Config(
    hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152_064, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip


def peak_bytes() -> int:
    """Return the peak resident memory of this process, including mapped files."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def check_memory(folder: Path, world: int) -> None:
    before = peak_bytes()
    model = sharded_model(PolicyModel, ModelSpec(str(folder)), get_device("cpu"))
    own = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert own == pytest.approx(
        4 * sum(math.prod(parameter.shape) for parameter in model.parameters()) / world, rel=0.01
    )
    # The shard, and the rows of the files that it was copied from: half of it, as those are bf16.
    assert peak_bytes() - before < 1.6 * own + (64 << 20), (peak_bytes() - before, own)


def test_a_rank_of_64_never_holds_a_7b_model(tmp_path):
    assert write_zeros(QWEN_7B, tmp_path) > 15e9
    assert os.stat(tmp_path / "model.safetensors").st_blocks * 512 < 1e6
    run_on_ranks(as_one_of_many, 1, "check_memory", 5, 64, tmp_path, 64)
