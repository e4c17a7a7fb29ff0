"""Fused kernels replace only modules that compute the same. The kernels are doubles of torch_npu's."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen3Config

from rltrain.common.device import DEVICES, get_device
from rltrain.common.errors import ConfigError
from rltrain.models import kernels
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from tests.batches import batch_of_rows
from tests.distance import distance

DOUBLES = Path(__file__).parent.parent / "npu/doubles/torch_npu/kernels.py"
SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
# Norms per model, MLPs, rotary functions. Gemma has 1 + weight and another activation.
FAMILIES = {
    "qwen3": (Qwen3Config(**SIZES, head_dim=8), (9, 2, 1)),
    "llama": (LlamaConfig(**SIZES), (5, 2, 1)),
    "phi3": (Phi3Config(**SIZES), (5, 2, 1)),
    "phi3, half a head turns": (Phi3Config(**SIZES, partial_rotary_factor=0.5), (5, 2, 1)),
    "gemma3": (Gemma3TextConfig(**SIZES, head_dim=8), (0, 0, 1)),
}


@pytest.fixture
def of_doubles(monkeypatch):
    spec = importlib.util.spec_from_file_location("torch_npu_kernels", DOUBLES)
    doubles = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(doubles)
    monkeypatch.setattr(kernels, "torch_npu", lambda: doubles)
    return kernels.torch_npu_kernels()


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_modules_compute_what_plain_ones_do(family, of_doubles, monkeypatch):
    config, expected = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():  # norms start at 1, where a forgotten weight would not be seen
        if "norm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.3)
    modeling = sys.modules[type(model).__module__]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)
    tokens = torch.arange(24).reshape(2, 12)
    results = []
    for fused in (False, True):
        if fused:
            found = kernels.fuse(model, of_doubles)
            monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # as where the kernels are
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        results.append([loss, *(weight.grad for weight in model.parameters())])
    norms = sum(count for name, count in found.items() if name.endswith("Norm"))
    assert (norms, sum(count for name, count in found.items() if name.endswith("MLP"))) == expected[:2]
    assert found[f"{modeling.__name__.rpartition('.')[2]}.apply_rotary_pos_emb"] == expected[2]
    assert distance(results[1], results[0]) < 1e-5


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("process_group")
def test_compiled_layers_compute_the_same_for_any_length(tiny_model):
    results = []
    counters = torch._dynamo.utils.counters
    counters.clear()  # other tests compile too
    rows = [torch.arange(4, 4 + length, dtype=torch.int32) % 16 + 4 for length in (9, 14, 6, 11, 17, 8)]
    for compiled in (False, True):
        spec = ModelSpec(str(tiny_model), gradient_checkpointing=True, compiled=compiled)
        policy = sharded_model(PolicyModel, spec, get_device("cpu")).train()
        found = []
        for first in (0, 2, 4):
            graphs = counters["stats"]["unique_graphs"]
            batch = batch_of_rows(rows[first : first + 2], [3, 3])
            found.append(policy(pack(batch, torch.device("cpu")), 1.0).log_probs)
        assert counters["stats"]["unique_graphs"] == graphs, "another length is another graph"
        assert (graphs > 0) == compiled
        torch.cat(found).sum().backward()
        results.append(
            [*(each.detach() for each in found), *(weight.grad.full_tensor() for weight in policy.parameters())]
        )
    assert distance(results[1], results[0]) < 1e-5


def test_kernels_follow_key_and_device():
    cpu, npu, cuda = (DEVICES[name] for name in ("cpu", "npu", "cuda"))
    assert kernels.kernels_of(cpu, True) is kernels.kernels_of(npu, False) is kernels.kernels_of(cuda, False) is None
    with pytest.raises(ConfigError, match=r"use_liger=True needs Liger's kernels: pip install 'rltrain\[liger\]'"):
        kernels.kernels_of(cuda, True)
