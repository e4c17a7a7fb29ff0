"""Engine replicas over several processes: the same answers and the same weights, whoever serves what."""

import importlib.util
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
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.tasks import GenerateTask
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
# name -> (processes, changed keys, bytes of a bucket, if need be another model)
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
    "vllm 2 as one replica": (2, {R + "name": "vllm", R + "tensor_model_parallel_size": 2}, 2**29),
    "sglang 1": (1, SGLANG, 2**29),
    "sglang 2 as one replica": (2, SGLANG | {R + "tensor_model_parallel_size": 2}, 2**29),
    "sglang 4 as two replicas": (4, SGLANG | {R + "tensor_model_parallel_size": 2, R + "max_num_seqs": 8}, 3000),
    "sglang 4 as one replica": (4, SGLANG | {R + "tensor_model_parallel_size": 4}, 3000),
}
if importlib.util.find_spec("sglang"):  # the real one; it draws without seeds on the CPU
    keys = {R + "name": "sglang", R + "tensor_model_parallel_size": 2}
    CUTS["real sglang 2 as one replica"] = (2, keys, 2**14, "even")
SEES = {"data__max_prompt_length": 48, R + "max_num_seqs": 16}
SEEING = {
    "images, hf 1": (1, SEES, 2**29),
    "images, hf 2": (2, SEES, 2**14),
    "images, vllm 2": (2, SEES | {R + "name": "vllm"}, 2**29),
    "images, vllm 2 as one replica": (2, SEES | {R + "name": "vllm", R + "tensor_model_parallel_size": 2}, 2**29),
}
# Every run has replicas of one process and of two, vLLM and SGLang over two, and no engine in four processes.
PARTS = [
    *("vllm 1", "vllm 2", "lora beside, vllm 2 as one replica"),
    *("sglang 4 as two replicas", "sglang 4 as one replica"),
]
CASES = [pytest.param(cut, marks=pytest.mark.long if cut in PARTS else ()) for cut in CUTS]
# Engines that draw alike: every cut answers as this one.
LIKE = {"hf": "hf 1", "vllm": "hf 1", "lora,": "lora, hf 1", "lora": "lora, hf 1", "sglang": "sglang 1"}


def run(folder: Path, changes: dict, bucket_bytes: int, model: str = "model") -> list[list[tuple]]:
    """For three policy versions and every rank: ids and answers of its samples, gap of engine and trainer, gap of the
    canary.
    """
    files = (folder / "train.parquet", folder / "train.parquet")
    cfg = load_config(small_run(folder / model, files, folder, **changes)).config
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
        found = [None] * dist.get_world_size()
        dist.all_gather_object(
            found, (numbers.per_sample.get("slot", np.zeros(0)).tolist(), rows, gap, numbers.sync.canary_gap)
        )
        versions.append(found)
        move(worker.actor, step)
    return versions


def move(actor, seed: int) -> None:
    """In the place of an update: the same change of what learns on any number of ranks."""
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
        found = run(folder, *(CUTS | SEEING)[name][1:])
        if rank == 0:
            torch.save(found, folder / f"{name}.pt")
        dist.barrier()
    os._exit(0)  # vLLM keeps threads


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_replicas_answer_to_pictures_as_one_does(family, tmp_path):
    from tests.tiny_vision import save_tiny_vision_model, write_pictures

    save_tiny_vision_model(tmp_path / "model", family, tied=False)
    write_pictures(tmp_path / "train.parquet", range(24))
    for name, (world, *_) in SEEING.items():
        run_on_ranks(rank_main, world, tmp_path, [name])
    alone = torch.load(tmp_path / "images, hf 1.pt", weights_only=False)
    for name in SEEING:
        versions = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        for version, expected in zip(versions, alone, strict=True):
            assert by_sample(version) == by_sample(expected)
            assert max(max(gap, canary) for _, _, gap, canary in version) < 1e-5


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """By cut: what `run` gave."""
    asked = {getattr(item, "callspec", None) and item.callspec.params.get("cut") for item in request.session.items}
    cuts = {name: cut for name, cut in CUTS.items() if name in asked or name in LIKE.values()}
    folder = tmp_path_factory.mktemp("replicas")
    before = set(Path("/dev/shm").glob("*cpushm*"))
    save_tiny_model(folder / "model")
    save_tiny_model(folder / "even", heads=4, kv_heads=2)  # SGLang on the CPU deals whole heads to its processes
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


@pytest.mark.few(6)
@pytest.mark.parametrize("cut", CASES)
def test_answers_do_not_depend_on_who_serves_them(found, cut):
    like = found[LIKE.get(cut.split()[0], cut)]
    for version, expected in zip(found[cut], like, strict=True):
        assert sorted(sample for ids, *_ in version for sample in ids) == list(range(48))
        assert by_sample(version) == by_sample(expected)


@pytest.mark.few(6)
@pytest.mark.parametrize("cut", CASES)
def test_every_policy_version_is_what_the_engine_generates_with(found, cut):
    answers = [by_sample(version) for version in found[cut]]
    assert answers[0] != answers[1] != answers[2]
    for version in found[cut]:
        for _, _, gap, canary in version:
            assert gap < 1e-5
            assert canary < 1e-5


def test_every_replica_serves_and_only_its_leader_answers(found):
    for name, versions in found.items():
        world, changes, *_ = CUTS[name]
        size = changes.get(R + "tensor_model_parallel_size", 1)
        assert [bool(ids) for ids, *_ in versions[0]] == [rank % size == 0 for rank in range(world)]
