"""Gathered weights: the number of collectives, and bit-exact results."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from rltrain.models.weights.names import CheckpointNames, gathered_weights
from tests.ranks import run_on_ranks

RANKS = 64


@pytest.fixture
def model():
    """Two matrices and a vector, sharded by rows over 64 ranks, of which only one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield sharded({"large": torch.zeros(512, 64), "small": torch.zeros(100, 8), "norm": torch.zeros(64)}, RANKS)
    dist.destroy_process_group()


def sharded(weights: dict[str, torch.Tensor], ranks: int) -> nn.ParameterDict:
    mesh = init_device_mesh("cpu", (ranks,))
    return nn.ParameterDict({name: nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for name, w in weights.items()})


@pytest.mark.parametrize(("bucket_bytes", "gathers"), [(1 << 20, 1), (1 << 16, 2), (0, 3)])
def test_a_bucket_is_one_gather_and_nothing_else(model, bucket_bytes, gathers):
    """The large weight fills the second bucket alone."""
    with CommDebugMode() as seen:
        found = list(gathered_weights(model, torch.float32, bucket_bytes))
    assert seen.get_total_counts() == gathers
    assert {weight.name: weight.values.shape for weight in found} == {
        "large": (512, 64),
        "small": (100, 8),
        "norm": (64,),
    }


SHAPES = {"even": (8, 3), "uneven": (7, 3), "fewer rows than ranks": (2, 5), "vector": (5,), "cube": (4, 2, 3)}


def rank_main(rank: int, world: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    model = sharded(weights, world)
    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes in (0, 100, 1 << 20):
            found = {weight.name: weight.values for weight in gathered_weights(model, dtype, bucket_bytes)}
            for name, whole in weights.items():
                assert torch.equal(found[name], whole.to(dtype)), (name, dtype, bucket_bytes)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_gathered_are_the_weights_to_the_bit(ranks):
    run_on_ranks(rank_main, ranks)


SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "shared_expert_intermediate_size": 48, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
# In ernie4_5_moe a buffer has another name; others have experts of their own, in many ways, or no difference at all.
# In hrm_text, which transformers 5.5 lacks, several weights in memory are one there.
FAMILIES = ["qwen3", "mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "minimax_m2"]
FAMILIES += ["hrm_text"] if "hrm_text" in CONFIG_MAPPING else []


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_layouts_are_those_of_a_checkpoint(family, tmp_path):
    kind = type(AutoConfig.for_model(family))
    known = kind().to_dict()
    model = AutoModelForCausalLM.from_config(kind(**{name: size for name, size in SIZES.items() if name in known}))
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    packed = nn.Module()
    packed.model = model
    for bucket_bytes in (0, 1 << 12, 1 << 20):
        weights = gathered_weights(packed, torch.float32, bucket_bytes, CheckpointNames(model))
        found = {weight.name: weight.values for weight in weights if weight.in_checkpoint}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
