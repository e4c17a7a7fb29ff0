"""Families with tensor parallelism or ring attention on four ranks: results equal one process in float64.

Small copies with random weights, as bench.models has them. docs/models.md lists them.
"""

import gc
import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bench.models import FAMILIES, rows_of
from rltrain.common.device import get_device
from rltrain.models.attention import packed
from rltrain.models.forward import PolicyModel
from rltrain.models.load import empty_model
from rltrain.models.tensor_parallel import COMPARED
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.run.preflight.small import random_model, small_copy
from tests.models.test_tensor_parallel import WORLD, check, given, of_rank, step
from tests.ranks import run_on_ranks

PAGE, RESULTS = (Path(__file__).parents[2] / folder / "models.md" for folder in ("docs", "bench/results"))
# Ranks that share matrices, sequences, and rings among these.
LAYOUTS = {"tensor 2": (2, 1, 1), "tensor 4": (4, 1, 1), "ring 2 x 2": (1, 4, 2)}


def listed() -> dict[str, list[str]]:
    """Return the cells of docs/models.md for tensor parallelism and ring attention, by family."""
    rows = re.findall(r"^\| (`.*`) \| (.*) \| (.*) \|$", PAGE.read_text().split("### Tensor parallelism")[1], re.M)
    return {name: cells for names, *cells in rows for name in re.findall(r"`(\w+)`", names) if name in FAMILIES}


CASES = [
    (name, layout)
    for name, cells in listed().items()
    for layout in LAYOUTS
    if FAMILIES[name].kind in CONFIG_MAPPING and cells[layout.startswith("ring")] == "compared"
]


def config_of(name: str):
    config = small_copy(CONFIG_MAPPING[FAMILIES[name].kind](**FAMILIES[name].fields))
    text = config.get_text_config()
    config.vocab_size = text.vocab_size = text.vocab_size_per_layer_input = 128
    return config


def test_the_page_lists_the_families_that_share_matrices():
    works = {name for name, row in rows_of(RESULTS.read_text()).items() if row.split(" | ")[2] == "works"}
    assert set(listed()) == works
    kinds = {
        name: CONFIG_MAPPING[FAMILIES[name].kind]().get_text_config().model_type
        for name in listed()
        if FAMILIES[name].kind in CONFIG_MAPPING
    }
    found = {name: "compared" if kind in COMPARED else "refused" for name, kind in kinds.items()}
    assert {name: listed()[name][0] for name in kinds} == found
    assert set(kinds.values()) >= COMPARED & set(CONFIG_MAPPING)


def rank_main(rank: int, world: int, folder: Path, cases: list[tuple[str, str]]) -> None:
    found = {}
    for name, layout in cases:
        size, sharing, ring = LAYOUTS[layout]
        made = ModelSpec(
            str(folder / name), tensor_size=size, sequence_parallel_size=sharing, ring_size=ring,
            gradient_checkpointing=FAMILIES[name].recomputes, longest=FAMILIES[name].longest,
        )  # fmt: skip
        policy = sharded_model(PolicyModel, made, get_device("cpu")).train()
        results = step(policy, of_rank(given(), rank, world, size * sharing), world / size)
        found[name, layout] = {key: each for key, each in results.items() if rank == 0 or key.startswith("scores")}
        del policy
        gc.collect()
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """Return a function of a case: the results of all ranks, and of one process in float64. Some cases share ranks."""
    own = [item for item in request.session.items if item.path == request.path and "results" in item.fixturenames]
    cases = [item.callspec.params["case"] for item in own]

    @lru_cache(1)
    def computed(first: int):
        return compute(tmp_path_factory.mktemp("families"), cases[first : first + 16])

    return lambda case: [found[case] for found in computed(cases.index(case) // 16 * 16)]


def compute(folder: Path, cases: list[tuple[str, str]]) -> list[dict]:
    expected = {}
    packed.register()
    for name in dict.fromkeys(name for name, _ in cases):
        plain = random_model(config_of(name), decoder_only=False, trust_remote_code=False)
        plain.save_pretrained(folder / name)
        model = empty_model(plain.config, packed.NAME, torch.float64).to_empty(device="cpu")
        model.tie_weights()
        values = dict([*plain.named_parameters(), *plain.named_buffers()])
        with torch.no_grad():
            for path, weight in [*model.named_parameters(), *model.named_buffers()]:
                weight.copy_(values[path])
        if any(hasattr(part, "is_transposed") for part in model.modules()):
            model.set_experts_implementation("eager")  # grouped products have no float64
        expected[name] = step(PolicyModel(model).train(), given(), 1)
    run_on_ranks(rank_main, WORLD, folder, cases)
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]
    return [*ranks, {case: expected[case[0]] for case in cases}]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # gpt_bigcode
@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case))
def test_a_family_computes_what_one_process_computes(results, case):
    # Distances of gradients in float32 without any sharing: 3e-4, 8e-5, 4e-5, 7e-6, and elsewhere less than 5e-6.
    bounds = {"gated delta": 1e-3, "gemma3n": 1e-4, "gemma4": 1e-4, "granite": 2e-5}
    text = f"{case[0]}, {FAMILIES[case[0]].peculiar}"
    bound = next((bound for word, bound in bounds.items() if word in text), 1e-5)
    *ranks, expected = results(case)
    check(ranks, expected, bound)
