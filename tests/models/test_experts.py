"""Expert parallelism: scores, learning and checkpoints equal one process."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM

from rltrain.common.columns.batch import Batch
from rltrain.common.device import get_device
from rltrain.config.schema.model import OptimConfig, ShardingConfig
from rltrain.models.attention import packed
from rltrain.models.attention.packing import pack
from rltrain.models.experts import experts_problem
from rltrain.models.forward import PolicyModel
from rltrain.models.optim import clip_gradients, make_optimizer
from rltrain.models.weights import shard
from rltrain.models.weights.names import CheckpointNames, gathered_weights
from rltrain.models.weights.shard import reshard, sharded_model
from rltrain.models.weights.slices import NotSliceable
from rltrain.models.weights.spec import ModelSpec
from rltrain.models.weights.state import load_training_state, moments, save_training_state
from tests.distance import distance
from tests.models.kinds import SIZES
from tests.models.test_routing import FAMILIES as ROUTED
from tests.models.test_routing import batch
from tests.ranks import run_on_ranks

WORLD = 4
# Llama 4 has experts of another kind.
FAMILIES = {name: keys for name, keys in ROUTED.items() if not name.startswith("llama4")}
# Ranks that share the experts, ranks that share sequences, ranks of a copy of the weights.
LAYOUTS = {
    "2": (2, 1, -1), "4": (4, 1, -1), "2, long sequences": (2, 2, -1), "2, two copies": (2, 1, 2),
    "2, recomputed, reduced once": (2, 1, -1),
}  # fmt: skip
# A family with biases, and one with shared experts beside those that are chosen; the others take the same road.
ALWAYS = {"gpt_oss, softmax of the chosen": "2", "deepseek_v3, groups of experts": "2", "qwen3_moe": LAYOUTS}
CASES = [
    pytest.param((name, layout), marks=() if layout in ALWAYS.get(name, ()) else pytest.mark.long)
    for name in FAMILIES
    for layout in LAYOUTS
]
ANSWERS = [(6, 3, 5), (1, 2, 9), (4, 4, 4), ()]  # of each rank; the last one only keeps step
CPU = torch.device("cpu")
# With a larger eps, as a gradient that is rounding alone would make a whole step.
OPTIM = OptimConfig(lr=1e-2, clip_grad=0.5, eps=1e-3)


def given(part: int) -> Batch:
    return batch(ANSWERS[part]) if ANSWERS[part] else Batch()


def step(policy, parts, scale: int, *, once: bool = False) -> dict[str, torch.Tensor]:
    """Return log-probs, those of tokens sent to other ranks, gradients, and the weights after a step of AdamW."""
    optimizer = make_optimizer(policy, OPTIM, get_device("cpu"))
    found = {}
    for part in parts:
        inputs = pack(given(part), CPU)
        with torch.no_grad():
            experts = policy(inputs, with_experts=True).experts.long()
            row = experts.new_zeros(len(inputs.tokens), *experts.shape[1:])
            row[inputs.by_sample()] = experts
            # All go to the first rank's experts, and the others have no token.
            elsewhere = replace(inputs, experts=torch.stack([row[..., 0] % 2, 1 - row[..., 0] % 2], -1))
            found[f"log_probs elsewhere {part}"] = policy(elsewhere).log_probs
            reshard(policy)
        for one in (inputs, elsewhere):
            if once:
                policy.set_requires_gradient_sync(one is elsewhere and part == parts[-1])
            outputs = policy(one, 0.7, True)
            ((outputs.log_probs.sum() + 0.3 * outputs.entropy.sum()) * scale).backward()
        found[f"log_probs {part}"] = policy(inputs, 0.7).log_probs.detach()
        reshard(policy)
    found |= {f"gradient {name}": whole(each.grad) for name, each in policy.named_parameters() if each.grad is not None}
    found["norm"] = clip_gradients(policy.parameters(), OPTIM.clip_grad)
    optimizer.step()
    return found | {
        f"weight {name}": each.clone() for name, each, _ in gathered_weights(policy, torch.float32, 1 << 12)
    }


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def spec(folder: Path, layout: str) -> ModelSpec:
    experts, size, fsdp_size = LAYOUTS[layout]
    sharding = ShardingConfig(fsdp_size=fsdp_size, expert_parallel_size=experts)
    recompute = "recomputed" in layout
    return ModelSpec(str(folder), fsdp=sharding, sequence_parallel_size=size, gradient_checkpointing=recompute)


def rank_main(rank: int, world: int, folder: Path, cases: list[tuple[str, str]]) -> None:
    found = {}
    for name, layout in cases:
        experts, size, _ = LAYOUTS[layout]
        policy = sharded_model(PolicyModel, spec(folder / name, layout), get_device("cpu")).train()
        kept = {len(each.to_local()) for path, each in policy.named_parameters() if ".mlp.experts." in path}
        assert kept == {8 // experts}
        # Ranks that share sequences compute the same one after the other; the others keep step.
        parts = [rank] if size == 1 else [rank // size, 2 + rank // size]
        found[name, layout] = step(policy, parts, world, once="once" in layout)
    everyone = [None] * world
    dist.all_gather_object(everyone, found)
    if rank == 0:
        torch.save(everyone, folder / "found.pt")


def save(name: str, folder: Path) -> AutoModelForCausalLM:
    kind, keys = FAMILIES[name]
    packed.register()
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES | keys)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=packed.NAME)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """The results of all ranks for the collected cases, and of one process."""
    own = [item for item in request.session.items if item.path == request.path and "found" in item.fixturenames]
    cases = [item.callspec.params["case"] for item in own]
    folder = tmp_path_factory.mktemp("experts")
    expected = {}
    for name in dict.fromkeys(name for name, _ in cases):
        model = save(name, folder / name)
        model.set_experts_implementation("eager")  # grouped products have no float64
        expected[name] = step(PolicyModel(model.double()).train(), range(WORLD), 1)
    run_on_ranks(rank_main, WORLD, folder, cases)
    return torch.load(folder / "found.pt"), expected


@pytest.mark.few(8)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_scores_gradients_and_a_step_are_those_of_one_process(found, case):
    everyone, expected = found[0], found[1][case[0]]
    ranks = [rank[case] for rank in everyone]
    scores = {key: each for rank in ranks for key, each in rank.items() if key.startswith("log_probs")}
    for kind in ("log_probs", "gradient", "norm", "weight"):
        one = {key: each for key, each in (scores | ranks[0]).items() if key.startswith(kind)}
        other = {key: each for key, each in expected.items() if key.startswith(kind)}
        assert distance(one, other) < 1e-5, kind


def state_of(policy, optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name} {part}": whole(values)
        for name, parameter in policy.named_parameters()
        for part, values in {"weight": parameter, **moments(optimizer, parameter)}.items()
    }


def goes_between_layouts(rank: int, world: int, folder: Path) -> None:
    """Every layout loads the weights and moments that another layout has saved, bit for bit; files too, however they
    are read."""
    states, files = {}, {}
    sizes = [(1, -1), (2, -1), (4, -1), (2, 2)]
    for size in sizes:
        own = ModelSpec(str(folder / "model"), fsdp=ShardingConfig(fsdp_size=size[1], expert_parallel_size=size[0]))
        policy = sharded_model(PolicyModel, own, get_device("cpu"))
        names = CheckpointNames(policy.model)
        files[size] = {name: each.clone() for name, each, _ in gathered_weights(policy, torch.float32, 1 << 12, names)}
        optimizer = make_optimizer(policy, OPTIM, get_device("cpu"))
        for parameter in policy.parameters():
            parameter.grad = torch.cos(size[0] * parameter.detach())
        optimizer.step()
        save_training_state(policy, optimizer, str(folder / f"{size}"))
        states[size] = state_of(policy, optimizer)
        for other in states:
            load_training_state(policy, optimizer, str(folder / f"{other}"))
            loaded = state_of(policy, optimizer)
            assert all(torch.equal(loaded[name], each) for name, each in states[other].items()), (size, other)
    load_training_state(policy, optimizer, str(folder / f"{(1, -1)}"))
    for size in sizes[1:]:
        assert files[size].keys() == files[1, -1].keys()
        assert all(torch.equal(files[size][name], each) for name, each in files[1, -1].items())

    def unreadable(*_):
        raise NotSliceable("no ranges of it can be read")

    shard.SlicedCheckpoint = unreadable
    policy = sharded_model(PolicyModel, own, get_device("cpu"))
    assert all(
        torch.equal(each, files[own.fsdp.expert_parallel_size, 2][name])
        for name, each, _ in gathered_weights(policy, torch.float32, 1 << 12, CheckpointNames(policy.model))
    )


def test_states_and_files_go_between_all_layouts(tmp_path):
    save("qwen3_moe", tmp_path / "model")
    run_on_ranks(goes_between_layouts, WORLD, tmp_path)


@pytest.mark.parametrize(("family", "size", "shards", "message"), [
    ("mixtral", 4, 8, None),
    ("mixtral", 3, 4, r"8 experts in a layer, whose weights have 32, 96 rows, and 4 ranks .* Use one of 2, 4\.$"),
    ("mixtral", 2, 14, r"No number fits: leave it out\.$"),
    ("llama4, one expert", 2, 4, r"^Llama4TextExperts computes experts in an unsupported way"),
])  # fmt: skip
def test_what_cannot_be_shared_is_told_with_what_can(family, size, shards, message):
    kind, keys = ROUTED[family]
    config = getattr(transformers, kind)(**SIZES | keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    problem = experts_problem(model, config, size, shards)
    assert problem is None if message is None else re.search(message, problem)
