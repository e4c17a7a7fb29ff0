"""Engine replicas over several processes: the same responses and weights, whichever replica serves a prompt."""

import itertools
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rltrain.config.load import load_config
from rltrain.config.step_passes import make_step_passes
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import encode_prompts
from rltrain.data.rows import read_rows
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.interface.tasks import GenerateTask
from rltrain.workers.rollout.contract import Sampling
from tests.batches import rows_of
from tests.ranks import run_on_ranks
from tests.tiny import save_tiny_model, small_run, write_arithmetic
from tests.workers import sglang_double

# Many processes are started, some of which import vLLM.
pytestmark = pytest.mark.timeout(900)
R = "actor_rollout_ref__rollout__"
TASK = GenerateTask("train", np.arange(12, dtype=np.int32), 4, Sampling(8), seed=1, step=1)
CALLS = itertools.count(1)
LORA = {"actor_rollout_ref__model__lora_rank": 3, "actor_rollout_ref__model__lora_alpha": 6}
BESIDE = LORA | {"actor_rollout_ref__model__lora__merge": False}
SGLANG = {R + "name": "sglang", f"+{R}engine_kwargs__sglang__enable_deterministic_inference": True}
# name -> (processes, changed keys, bytes of a bucket)
CUTS = {
    "hf 1": (1, {}, 2**29),
    "hf 2, pulled": (2, {R + "max_num_seqs": 4}, 2**29),
    "hf 2, a weight per bucket": (2, {}, 3000),
    "hf 4, replicas of shards": (4, {"actor_rollout_ref__actor__fsdp_config__fsdp_size": 2}, 2**14),
    "vllm 1": (1, {R + "name": "vllm"}, 2**29),
    "vllm 2": (2, {R + "name": "vllm", R + "max_num_seqs": 16}, 2**14),
    "lora, hf 1": (1, LORA, 2**29),
    "lora, hf 2, a weight per bucket": (2, LORA, 3000),
    "lora beside, hf 2": (2, BESIDE, 3000),
    "lora beside, vllm 2 as one replica": (2, BESIDE | {R + "name": "vllm", R + "tensor_model_parallel_size": 2}, 3000),
    "vllm 2 as one replica": (2, {R + "name": "vllm", R + "tensor_model_parallel_size": 2}, 3000),
    "vllm 4 as two replicas": (4, {R + "name": "vllm", R + "tensor_model_parallel_size": 2}, 2**29),
    "vllm 4 as two replicas, copies of shards": (4, {
        R + "name": "vllm", R + "tensor_model_parallel_size": 2, "actor_rollout_ref__actor__fsdp_config__fsdp_size": 2,
    }, 3000),
    "sglang 1": (1, SGLANG, 2**29),
    "sglang 2 as one replica": (2, SGLANG | {R + "tensor_model_parallel_size": 2}, 2**29),
    "sglang 4 as two replicas": (4, SGLANG | {R + "tensor_model_parallel_size": 2, R + "max_num_seqs": 8}, 3000),
    "sglang 4 as one replica": (4, SGLANG | {R + "tensor_model_parallel_size": 4}, 3000),
}  # fmt: skip
# The cases of every run; the others are long.
OFTEN = [
    *("hf 1", "hf 4, replicas of shards", "lora, hf 2, a weight per bucket", "lora beside, hf 2"),
    *("vllm 2 as one replica", "sglang 2 as one replica"),
]
CASES = [pytest.param(cut, marks=() if cut in OFTEN else pytest.mark.long) for cut in CUTS]
# Engines that draw alike: every cut answers as this one.
LIKE = {"hf": "hf 1", "vllm": "hf 1", "lora,": "lora, hf 1", "lora": "lora, hf 1", "sglang": "sglang 1"}


def run(folder: Path, changes: dict, bucket_bytes: int) -> list[list[tuple]]:
    """Return, for three policy versions and every rank: ids and responses of its samples, gap of engine and trainer,
    gap of the canary, received weights in GiB.
    """
    files = (folder / "train.parquet", folder / "train.parquet")
    cfg = load_config(small_run(folder / "model", files, folder, **changes)).config
    rows = read_rows(str(files[0]))
    prompts = encode_prompts(rows, chat_encoder(cfg), cfg.data.max_prompt_length, True)
    worker = HybridWorker(cfg, {"train": prompts}, {"train": rows.select(prompts.row_index)})
    worker.init_models(make_step_passes(cfg, prompts.has_images))
    worker.rollout.weight_sync.bucket_bytes = bucket_bytes
    versions = []
    for step in range(3):
        payload, _, numbers = worker.rollout.generate(replace(TASK, step=step, call=next(CALLS)))
        compared = worker.actor.log_probs(payload, [len(payload)])[1]
        gap = compared.moments["gap"].mean if len(payload) else 0.0
        rows = [row.tolist() for row in rows_of(payload)] if len(payload) else []
        found, sync = [None] * dist.get_world_size(), numbers.sync
        dist.all_gather_object(
            found,
            (numbers.per_sample.get("slot", np.zeros(0)).tolist(), rows, gap, sync.canary_gap, sync.gigabytes),
        )
        versions.append(found)
        move(worker.actor, step)
    return versions


def move(actor, seed: int) -> None:
    """Replace an update: apply the same change of the trained weights on any number of ranks."""
    torch.manual_seed(seed)
    for parameter in (each for each in actor.policy.parameters() if each.requires_grad):
        mesh = parameter.device_mesh
        parts = (torch.randn(parameter.shape) * 0.05).chunk(mesh.size(mesh.ndim - 1))
        if mesh.get_local_rank(mesh.ndim - 1) < len(parts):
            parameter.data.to_local().add_(parts[mesh.get_local_rank(mesh.ndim - 1)])
    actor.updater.num_steps += 1


def rank_main(rank: int, world: int, folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    if names[0].startswith("sglang"):
        sys.modules.update(sglang_double.MODULES)
    for name in names:
        found = run(folder, *CUTS[name][1:])
        if rank == 0:
            torch.save(found, folder / f"{name}.pt")
        dist.barrier()
    os._exit(0)  # vLLM keeps threads


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """The results of `run` by layout."""
    asked = {getattr(item, "callspec", None) and item.callspec.params.get("cut") for item in request.session.items}
    cuts = {name: cut for name, cut in CUTS.items() if name in asked or name in LIKE.values()}
    folder = tmp_path_factory.mktemp("replicas")
    before = set(Path("/dev/shm").glob("*cpushm*"))
    save_tiny_model(folder / "model")
    write_arithmetic(folder / "train.parquet", range(24))
    # Cuts of as many processes share them, but for engines that take a process for themselves.
    starts: dict[object, list[str]] = {}
    for name, (world, *_) in cuts.items():
        starts.setdefault(name if "vllm" in name or "sglang" in name else world, []).append(name)
    for names in starts.values():
        world = CUTS[names[0]][0]
        run_on_ranks(rank_main, world, folder, names)
    left = set(Path("/dev/shm").glob("*cpushm*")) - before
    assert not left, "shared memory is left behind"
    return {name: torch.load(folder / f"{name}.pt", weights_only=False) for name in cuts}


def by_sample(version: list[tuple]) -> dict[int, list[int]]:
    return {sample: row for ids, rows, *_ in version for sample, row in zip(ids, rows, strict=True)}


@pytest.mark.parametrize("cut", CASES)
def test_every_replica_answers_alike_with_the_weights_of_each_policy_version(found, cut):
    answers = [by_sample(version) for version in found[cut]]
    assert answers[0] != answers[1] != answers[2]
    assert answers == [by_sample(version) for version in found[LIKE.get(cut.split()[0], cut)]]
    for version in found[cut]:
        assert sorted(sample for ids, *_ in version for sample in ids) == list(range(48))
        assert max(max(gap, canary) for _, _, gap, canary, _ in version) < 1e-5
    world, changes, *_ = CUTS[cut]
    size = changes.get(R + "tensor_model_parallel_size", 1)
    if cut.startswith("vllm") and "replica" in cut:
        first, *later = [[gigabytes for *_, gigabytes in version] for version in found[cut]]
        assert all(0 < now < 0.6 * before for version in later for now, before in zip(version, first, strict=True)), (
            "each rank receives its half of the weights after the first sync"
        )
    assert [bool(ids) for ids, *_ in found[cut][0]] == [rank % size == 0 for rank in range(world)], "leaders answer"
