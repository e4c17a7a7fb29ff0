"""Ranks that share sequences compute the same scores, values and gradients as one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

from rltrain.common.columns.batch import Batch
from rltrain.common.device import get_device
from rltrain.common.errors import ConfigError
from rltrain.models.attention.packing import AttentionPlan, PackedInputs, Segment, pack
from rltrain.models.attention.ulysses import sequence_group
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from tests.batches import batch_of_rows
from tests.distance import distance
from tests.models.kinds import KINDS, plain_model
from tests.models.test_forward import FAMILIES, SIZES, make_batch
from tests.ranks import run_on_ranks

WORLD = 4
MODELS = {
    **FAMILIES,
    # Keys and values of 3 heads are repeated to 6 heads for 2 ranks, and to 12 for 4.
    "qwen3_uneven_heads": Qwen3Config(**SIZES | {"num_attention_heads": 12, "num_key_value_heads": 3}, head_dim=8),
    **{name: KINDS[name] for name in ("gpt_oss, sinks", "llama4, chunks and temperature", "qwen3_5, gated delta net")},
}
# Odd inputs: one family, and the critic.
CASES = [(name, "packed") for name in MODELS] + [("mistral_sliding_window", "shared prompt")]
CASES += [(name, "shared prompt") for name in MODELS if name in KINDS]
CASES += [
    (name, which) for name in ("qwen2_tied", "critic") for which in ("shared prompt", "fewer tokens than ranks", "idle")
]
CPU = torch.device("cpu")


def shared_prompt() -> PackedInputs:
    """One prompt of 5 tokens, then responses of 4, 1 and 3, whose first tokens are predicted at the prompt's last
    position."""
    torch.manual_seed(2)
    tokens = torch.randint(2, 128, (13,))
    starts, lengths = [5, 9, 10], [4, 1, 3]
    answers = [Segment(start, start + n, (0, 5)) for start, n in zip(starts, lengths, strict=True)]
    predictors = [[4, *range(start, start + n - 1)] for start, n in zip(starts, lengths, strict=True)]
    places = torch.tensor([each for row in predictors for each in row])
    return PackedInputs(
        tokens, torch.cat([torch.arange(5), *(torch.arange(5, 5 + n) for n in lengths)]),
        AttentionPlan((Segment(0, 5), *answers)), places, tokens[5:], places,
    )  # fmt: skip


def inputs_by_name() -> dict[str, PackedInputs]:
    two = batch_of_rows([torch.tensor([7, 9], dtype=torch.int32)], [1])
    return {
        "packed": pack(make_batch(), CPU),
        "shared prompt": shared_prompt(),
        "fewer tokens than ranks": pack(two, CPU),
        "idle": pack(Batch(), CPU),
    }


def load(kind: type, folder: Path):
    return sharded_model(kind, ModelSpec(str(folder), gradient_checkpointing=True), get_device("cpu"))


def run(model, inputs: PackedInputs, size: int) -> dict[str, torch.Tensor]:
    """Return the results of a forward and backward pass; every group of ``size`` ranks computes the same."""
    model.group = sequence_group(model.model.config, size, "key")
    lengths = []
    hook = model.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: lengths.append(args[0].shape[1])
    )
    if isinstance(model, PolicyModel):
        model.measure_load()
        if model.routing:
            shape = model.routing.num_layers, model.routing.num_experts
            model.balance(torch.rand(shape, generator=torch.Generator().manual_seed(3)))
        log_probs, entropy, *_, balance = model(inputs, 0.7, True)
        found, loss = {"log_probs": log_probs, "entropy": entropy}, log_probs.sum() + 0.3 * entropy.sum()
        if balance is not None:
            found, loss = found | {"balance": balance}, loss + balance
    else:
        values = model(inputs)
        found, loss = {"values": values}, (values * torch.arange(1, len(values) + 1)).sum()
    # FSDP takes the mean over all ranks, each of which has one part in `size` of the gradient.
    (loss * size).backward()
    hook.remove()
    # Behind the backward pass, which recomputes activations as the last forward went.
    if isinstance(model, PolicyModel) and (load := model.load()) is not None:
        dist.all_reduce(load)
        found["load"] = load // (WORLD // size)
    gradients = {
        name: parameter.grad.full_tensor() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    found |= {"length": torch.tensor(lengths[0])} | gradients
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def rank_main(rank: int, world: int, folder: Path) -> None:
    found = {}
    models = {name: load(PolicyModel, folder / name) for name in MODELS}
    models["critic"] = load(ScalarModel, folder / "llama")
    models["critic"].score.weight.detach().to_local().fill_(0.1)
    everything = inputs_by_name()
    for name, which in CASES:
        for size in (1, 2, 4):
            found[name, which, size] = run(models[name].train(), everything[which], size)
    torch.save(found, folder / f"rank_{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of the first and the last rank by model, inputs and group size."""
    folder = tmp_path_factory.mktemp("ulysses")
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = plain_model(name) if name in KINDS else AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / name)
    run_on_ranks(rank_main, WORLD, folder)
    return [torch.load(folder / f"rank_{rank}.pt") for rank in (0, WORLD - 1)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("name", "which"), CASES)
def test_sharing_sequences_changes_no_score_and_no_gradient(found, name, which, size):
    num_tokens = inputs_by_name()[which].tokens.numel()
    for rank in found:
        alone, shared = rank[name, which, 1], rank[name, which, size]
        assert (alone["length"], shared["length"]) == (num_tokens, -(-num_tokens // size))
        assert alone.keys() == shared.keys()
        assert "load" not in alone or torch.equal(alone["load"], shared["load"])
        outputs = {name for name in alone if name in ("log_probs", "entropy", "values", "balance")}
        for names in (outputs, alone.keys() - outputs - {"length", "load"}):
            one, other = ({name: found[name] for name in names} for found in (shared, alone))
            if which == "idle":
                assert not any(each.any() for found in (one, other) for each in found.values())
            else:
                assert distance(one, other) < 1e-5


def test_heads_that_do_not_divide_are_refused_before_loading():
    message = r"actor\.size=3 does not divide the 4 attention heads of the model\. Use one of 1, 2, 4\."
    with pytest.raises(ConfigError, match=message):
        sequence_group(MODELS["llama"], 3, "actor.size")
    assert sequence_group(MODELS["llama"], 1, "actor.size") is None
    hybrid = Qwen3_5TextConfig(num_attention_heads=6, linear_num_value_heads=4)
    with pytest.raises(ConfigError, match=r"divide the 4 recurrent heads of the model\. Use one of 1, 2, 4\."):
        sequence_group(hybrid, 3, "actor.size")
