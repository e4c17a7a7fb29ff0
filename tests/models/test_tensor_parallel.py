"""Tensor parallelism: scores, gradients, updated weights and checkpoints equal one process in float64."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rltrain.algorithms.distillation import JSD
from rltrain.common.columns.batch import Batch
from rltrain.common.columns.names import ROUTED_EXPERTS
from rltrain.common.device import get_device
from rltrain.config.schema.model import OptimConfig, ShardingConfig
from rltrain.models.attention import packed
from rltrain.models.attention.packing import pack, per_computed_token
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.optim import clip_gradients, make_optimizer
from rltrain.models.tensor_parallel import tensor_problem
from rltrain.models.weights.lora import Lora
from rltrain.models.weights.names import CheckpointNames, gathered_weights
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.models.weights.state import load_training_state, moments, save_training_state
from rltrain.workers.inference_models import ReferenceDistribution
from rltrain.workers.updates.expert_balance import ExpertBalance
from tests.distance import distance
from tests.models.kinds import DELTA, SIZES, TABLE
from tests.models.test_routing import FAMILIES as ROUTED
from tests.models.test_routing import batch
from tests.ranks import run_on_ranks
from tests.tiny_vision import save_tiny_vision_model

WORLD = 4
FAMILIES = {
    "qwen2, biases and tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3, norms of heads": ("Qwen3Config", {}),
    "phi3, fused": ("Phi3Config", {}),
    "glm4, fused": ("Glm4Config", {}),
    "gpt_neox, interleaved": ("GPTNeoXConfig", {}),
    "gemma2": TABLE["gemma2, capped"],
    "gpt_oss": ROUTED["gpt_oss, softmax of the chosen"],
    "qwen3_moe": ROUTED["qwen3_moe"],
    "deepseek_v3": ROUTED["deepseek_v3, groups of experts"],
}
# Ranks that share matrices, sequences and experts, and ranks of a copy of the weights.
LAYOUTS = {
    "1": (1, 1, 1, -1), "2": (2, 1, 1, -1), "4": (4, 1, 1, -1), "2, long sequences": (2, 2, 1, -1),
    "2, two copies": (2, 1, 1, 2), "2, experts on 2": (2, 1, 2, -1), "2, experts on 4": (2, 1, 4, -1),
}  # fmt: skip
# Every kind of weight and layout that is split in its own way; the others take the same road.
ALWAYS = [
    ("qwen3, norms of heads", "2"), ("phi3, fused", "4"), ("deepseek_v3", "4"), ("gpt_oss", "2, long sequences"),
    ("qwen3_moe", "2, experts on 2"),
]  # fmt: skip
LONG = [(name, layout) for name in FAMILIES for layout in ("2", "4")]
LONG += [("qwen3_moe", layout) for layout in LAYOUTS if layout not in ("1", "2", "4")]
CASES = [*ALWAYS, *(pytest.param(case, marks=pytest.mark.long) for case in LONG if case not in ALWAYS)]
ANSWERS = [(6, 3, 5), (1, 2, 9), (4, 4, 4), ()]
CPU = torch.device("cpu")
# With a larger eps, as a gradient that is rounding alone would make a whole step.
OPTIM = OptimConfig(lr=1e-2, clip_grad=0.5, eps=1e-3)


def given() -> dict[int, Batch]:
    return {part: batch(answers) if answers else Batch() for part, answers in enumerate(ANSWERS)}


def of_rank(parts: dict[int, Batch], rank: int, world: int, same: int) -> dict[int, Batch]:
    """Return the batches of a rank. same: the number of neighbours with equal batches."""
    return {part: samples for part, samples in parts.items() if part % (world // same) == rank // same}


def step(policy, parts: dict[int, Batch], scale: float) -> dict[str, torch.Tensor]:
    """Return log-probs of numbered batches, gradients, their norm, and the weights after a step of AdamW."""
    optimizer = make_optimizer(policy, OPTIM, get_device("cpu"))
    found = {}
    for part, samples in parts.items():
        outputs = policy(pack(samples, CPU), 0.7, True, None, True)
        ((outputs.log_probs.sum() + 0.3 * outputs.entropy.sum()) * scale).backward()
        names = ("log_probs", "entropy", "sum_pi_squared")
        found |= {f"scores {name} {part}": getattr(outputs, name).detach() for name in names}
    found |= {f"gradient {name}": whole(each.grad) for name, each in policy.named_parameters() if each.grad is not None}
    found["norm"] = clip_gradients(policy.parameters(), OPTIM.clip_grad)
    optimizer.step()
    return found | {
        f"weight {name}": each.clone() for name, each, _ in gathered_weights(policy, torch.float32, 1 << 12)
    }


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def spec(folder: Path, layout: str) -> ModelSpec:
    size, sharing, experts, fsdp_size = LAYOUTS[layout]
    return ModelSpec(
        str(folder), fsdp=ShardingConfig(fsdp_size=fsdp_size, expert_parallel_size=experts), tensor_size=size,
        sequence_parallel_size=sharing, gradient_checkpointing=True,
    )  # fmt: skip


def rank_main(rank: int, world: int, folder: Path, cases: list[tuple[str, str]]) -> None:
    found = {}
    for name, layout in cases:
        size, sharing, *_ = LAYOUTS[layout]
        policy = sharded_model(PolicyModel, spec(folder / name, layout), get_device("cpu")).train()
        same = size * sharing
        found[name, layout] = step(policy, of_rank(given(), rank, world, same), world / size)
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
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """Return the results of all ranks for the collected cases, and of one process."""
    own = [item for item in request.session.items if item.path == request.path and "found" in item.fixturenames]
    cases = [item.callspec.params["case"] for item in own]
    folder = tmp_path_factory.mktemp("tensor_parallel")
    expected = {}
    for name in dict.fromkeys(name for name, _ in cases):
        model = save(name, folder / name)
        model.set_experts_implementation("eager")  # grouped products have no float64
        expected[name] = step(PolicyModel(model.double()).train(), given(), 1)
    run_on_ranks(rank_main, WORLD, folder, cases)
    return torch.load(folder / "found.pt"), expected


def check(ranks: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor], bound: float = 1e-5) -> None:
    """Compare the results of `step` on all ranks with one process."""
    scores = {key: each for rank in ranks for key, each in rank.items() if key.startswith("scores")}
    for kind in ("scores", "gradient", "norm", "weight"):
        one = {key: each for key, each in (scores | ranks[0]).items() if key.startswith(kind)}
        other = {key: each for key, each in expected.items() if key.startswith(kind)}
        assert distance(one, other) < bound, kind


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_gradients_and_a_step_are_those_of_one_process(found, case):
    check([rank[case] for rank in found[0]], found[1][case[0]])


def replay_experts(rank: int, world: int, folder: Path) -> None:
    """Record experts, replay others with a balance loss, and compare all layouts with FSDP alone."""
    expected = {}
    for layout in ("1", "2", "4", "2, experts on 2", "2, long sequences"):
        size, sharing, *_ = LAYOUTS[layout]
        policy = sharded_model(PolicyModel, spec(folder / "model", layout), get_device("cpu")).train()
        parts, found = of_rank(given(), rank, world, size * sharing), {}
        for part, samples in parts.items():
            with torch.no_grad():
                experts = policy(pack(samples, CPU), with_experts=True).experts
            found[f"experts {part}"] = experts
            if len(samples):
                samples.update({ROUTED_EXPERTS: per_computed_token((experts + 1) % 8, samples)})
        passes = SimpleNamespace(router_replay="R2", balances_experts=True)
        ExpertBalance(policy, get_device("cpu"), passes, 0.0).begin(list(parts.values()))
        policy.measure_load()
        for part, samples in parts.items():
            outputs = policy(pack(samples, CPU), with_experts=True)
            found[f"replayed {part}"], found[f"log_probs {part}"] = outputs.experts, outputs.log_probs.detach()
            ((outputs.log_probs.sum() + outputs.balance_loss) * world / size).backward()
        load = policy.load()
        dist.all_reduce(load)
        everyone = [None] * world
        dist.all_gather_object(everyone, found)
        found = {name: values for own in everyone for name, values in own.items() if len(values)}
        found |= {f"gradient {name}": whole(each.grad) for name, each in policy.named_parameters()}
        found["load"] = load
        expected = expected or found
        for kind in ("experts", "replayed", "log_probs", "gradient", "load"):
            one, other = ([each[key] for key in sorted(each) if key.startswith(kind)] for each in (found, expected))
            assert distance(one, other) < (1e-5 if kind in ("log_probs", "gradient") else 1e-9), (layout, kind)


def test_recorded_and_replayed_experts_are_those_of_fsdp_alone(tmp_path):
    save("qwen3_moe", tmp_path / "model")
    run_on_ranks(replay_experts, WORLD, tmp_path)


def state_of(policy, optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name} {part}": whole(values)
        for name, parameter in policy.named_parameters()
        for part, values in {"weight": parameter, **moments(optimizer, parameter)}.items()
    }


def goes_between_sizes(rank: int, world: int, folder: Path) -> None:
    """Load the checkpoint of each layout in every other layout, bit-equal; compare the exports."""
    states, files = {}, {}
    for layout in ("1", "2", "4", "2, experts on 2"):
        policy = sharded_model(PolicyModel, spec(folder / "model", layout), get_device("cpu"))
        names = CheckpointNames(policy.model)
        files[layout] = {
            name: each.clone() for name, each, _ in gathered_weights(policy, torch.float32, 1 << 12, names)
        }
        optimizer = make_optimizer(policy, OPTIM, get_device("cpu"))
        for parameter in policy.parameters():
            parameter.grad = torch.cos((len(states) + 1) * parameter.detach())
        optimizer.step()
        save_training_state(policy, optimizer, str(folder / layout))
        states[layout] = state_of(policy, optimizer)
        for other in states:
            load_training_state(policy, optimizer, str(folder / other))
            loaded = state_of(policy, optimizer)
            assert all(torch.equal(loaded[name], each) for name, each in states[other].items()), (layout, other)
        assert files[layout].keys() == files["1"].keys()
        assert all(torch.equal(files[layout][name], each) for name, each in files["1"].items())


def test_states_and_files_go_between_all_sizes(tmp_path):
    save("qwen3_moe", tmp_path / "model")
    run_on_ranks(goes_between_sizes, WORLD, tmp_path)


@pytest.mark.parametrize(("kind", "keys", "size", "message"), [
    ("Qwen3Config", {}, 2, None),
    ("Qwen3Config", {"num_key_value_heads": 1}, 4, None),
    ("Qwen3Config", {"num_attention_heads": 6, "num_key_value_heads": 2}, 3, r"6 attention heads .* one of 1, 2, 6"),
    ("Qwen3Config", {"vocab_size": 129}, 2, r"does not divide the vocabulary of 129 tokens"),
    ("Qwen3Config", {"intermediate_size": 49}, 2, r"does not divide the 49 columns of model\.layers\.0\.mlp"),
    ("BloomConfig", {}, 2, r"^bloom has not been compared"),
    ("Olmo2Config", {}, 2, r"^Olmo2Attention has k_norm, which the plan .* does not cover"),
    ("Qwen3_5TextConfig", DELTA, 2, r"linear_attn\.\w+, which the plan"),
])  # fmt: skip
def test_models_that_cannot_be_shared_are_refused_with_a_fix(kind, keys, size, message):
    config = getattr(transformers, kind)(**SIZES | keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    problem = tensor_problem(model, config, size)
    assert problem is None if message is None else re.search(message, problem or "")


# Kinds of models and losses whose results on ranks that share matrices are compared with those of FSDP alone.
KINDS = {
    "adapters": ("qwen3, norms of heads", ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]),
    "adapters of fused weights": ("phi3, fused", "all-linear"),
    "adapters of latent attention": ("deepseek_v3", ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
    "adapters of experts": ("qwen3_moe", ["q_proj", "v_proj", "experts"]),
    "critic": ("qwen3, norms of heads", None),
    "exact divergence": ("qwen3, norms of heads", None),
    "images": (None, None),
}


def save_adapter(folder: Path, targets) -> None:
    """Save adapters of rank 2 whose B is not zero."""
    named = "all-linear" if isinstance(targets, str) else [name for name in targets if name != "experts"]
    stacks = ["experts.gate_up_proj", "experts.down_proj"] if "experts" in targets else None
    config = LoraConfig(
        r=2, target_modules=named, target_parameters=stacks, task_type="CAUSAL_LM", init_lora_weights=False
    )
    torch.manual_seed(1)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(folder / "adapter")


def compare_kinds(rank: int, world: int, folder: Path) -> None:
    for kind, (_, targets) in KINDS.items():
        results = {}
        for layout in ("1", "2", "4"):
            made = spec(folder / kind, layout)
            if targets:
                path = str(folder / kind / "adapter")
                made = replace(
                    made, lora=Lora("actor_rollout_ref.model", 2, 4.0, targets, None, path, torch.float32, 1)
                )
            made = replace(made, tower="trained") if kind == "images" else made
            model = sharded_model(ScalarModel if kind == "critic" else PolicyModel, made, get_device("cpu")).train()
            results[layout] = results_of(kind, model, made, world)
        for layout, found in results.items():
            assert distance(found, results["1"]) < 1e-5, (kind, layout, distance(found, results["1"]))


def results_of(kind: str, model, made: ModelSpec, world: int) -> dict[str, torch.Tensor]:
    """Return scores, gradients and the weights after a step of AdamW."""
    optimizer = make_optimizer(model, OPTIM, get_device("cpu"))
    inputs = pack(images_batch(made.path) if kind == "images" else given()[0], CPU)
    if kind == "critic":
        with torch.no_grad():
            model.score.weight.to_local().fill_(0.1)
        scores = loss = model(inputs)
    else:
        beside = None
        if kind == "exact divergence":
            other = sharded_model(PolicyModel, replace(made, path=f"{made.path} reference"), get_device("cpu"))
            beside = ReferenceDistribution(other, JSD(0.3)).states(inputs)
        outputs = model(inputs, 0.7, True, beside)
        scores, loss = outputs.log_probs, outputs.log_probs + 0.3 * outputs.entropy
        if outputs.kl is not None:
            scores, loss = torch.stack([scores, outputs.kl]), loss + 2 * outputs.kl
    # Every rank computes the same sample, and FSDP averages over the ranks that share no matrices.
    loss.sum().backward()
    found = {"scores": scores.detach()} | {
        f"gradient {name}": whole(each.grad) for name, each in model.named_parameters() if each.grad is not None
    }
    found["norm"] = clip_gradients(model.parameters(), OPTIM.clip_grad)
    optimizer.step()
    return found | {f"weight {name}": each.clone() for name, each, _ in gathered_weights(model, torch.float32, 1 << 12)}


def images_batch(folder: str) -> Batch:
    from tests.models.test_vision_packed import make_batch

    return make_batch(folder)


def test_adapters_critics_divergences_and_images_equal_those_of_fsdp_alone(tmp_path):
    for kind, (family, targets) in KINDS.items():
        if family:
            save(family, tmp_path / kind)
        if targets:
            save_adapter(tmp_path / kind, targets)
    other = AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES), attn_implementation=packed.NAME)
    other.save_pretrained(tmp_path / "exact divergence reference")
    save_tiny_vision_model(tmp_path / "images", "qwen3_vl", tied=True, heads=4, kv_heads=2)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "images")
    model.resize_token_embeddings(28)  # 4 ranks do not divide the 26 tokens of the tiny tokenizer
    model.save_pretrained(tmp_path / "images")
    run_on_ranks(compare_kinds, WORLD, tmp_path)
