"""Steps of the algorithms on the stand-in and on the CPU, without Ray, in one process with both devices."""

import itertools
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
import torch_npu  # noqa: F401

from tests.distance import distance
from tests.local import local_trainer
from tests.npu import probe  # noqa: F401  (the CPU computes attention as the NPU does)
from tests.tiny import save_tiny_model, save_tiny_reward_model, small_run, write_arithmetic
from tests.tiny_vision import save_tiny_vision_model, write_pictures
from tests.trainer.steps import ACTOR, GAE, VARIANTS, numbers_of, weights

MODEL, ROLLOUT = "actor_rollout_ref__model__", "actor_rollout_ref__rollout__"
# Everything rests on the host that can, in the dtype of the CPU.
KEYS = {
    ROLLOUT + "name": "hf",
    ROLLOUT + "dtype": "float32",
    ACTOR + "fsdp_config__compute_dtype": "float32",
    ACTOR + "fsdp_config__param_offload": True,
    ACTOR + "fsdp_config__optimizer_offload": True,
    "actor_rollout_ref__ref__fsdp_config__param_offload": True,
    "critic__model__fsdp_config__compute_dtype": "float32",
    "critic__model__fsdp_config__param_offload": True,
    "critic__model__fsdp_config__optimizer_offload": True,
    "reward_model__model__fsdp_config__compute_dtype": "float32",
    "reward_model__model__fsdp_config__param_offload": True,
}
LORA = {MODEL + "lora_rank": 4, ACTOR + "optim__lr": 0.01}
HALF = {ACTOR + "fsdp_config__compute_dtype": "bfloat16", ROLLOUT + "dtype": "bfloat16"}
CARRY = {ROLLOUT + "tail": "carry_over", ROLLOUT + "oversample_ratio": 1.5}
CARRY |= {"algorithm__rollout_correction__rollout_is": "token"}


@contextmanager
def _alone():
    dist.init_process_group("cpu:gloo,npu:hccl", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
    dist.destroy_process_group()


def _two_steps(device: str, model: Path, files: tuple[Path, Path], folder: Path, keys: dict[str, object]):
    """Return the movement of the weights of actor and critic, and the numbers of both steps."""
    count = itertools.count()
    twist = lambda row, score: score + (next(count) * 7 % 5) / 5  # noqa: E731
    trainer = local_trainer(
        small_run(model, files, folder / "run", **(KEYS | keys | {"trainer__device": device})), twist
    )
    models = [trainer.worker.actor.policy] + ([trainer.worker.critic.model] if trainer.critic else [])
    before = [weights(each).cpu() for each in models]
    numbers = [numbers_of(trainer.step(step).metrics) for step in (1, 2)]
    return [weights(each).cpu() - was for each, was in zip(models, before, strict=True)], numbers


def _compare(*place, keys: dict[str, object], apart: float = 0, near: float = 1e-5) -> None:
    (moved, numbers), (expected, theirs) = (_two_steps(device, *place, keys) for device in ("npu", "cpu"))
    for mine, other in zip(moved, expected, strict=True):
        assert mine.norm() > 0.02
        assert distance(mine, other) <= apart, keys
    for mine, other in zip(numbers, theirs, strict=True):
        # The device tells its memory and its FLOPs besides.
        assert other == pytest.approx({name: mine[name] for name in other}, rel=near, abs=near)


def texts(*names: str) -> None:
    """Two steps of each named variant (default: all) move weights on both devices equally, bit for bit."""
    with _alone() as folder:
        model, rewards = save_tiny_model(folder / "model"), save_tiny_reward_model(folder / "rewards")
        files = tuple(write_arithmetic(folder / f"{each}.parquet", range(24)) for each in ("train", "test"))
        own = {"adapters": LORA, "half precision": HALF, "carry over": CARRY}
        own["reward model"] = {"reward_model__enable": True, "reward_model__model__path": rewards}
        for name in names or (*VARIANTS, *own):
            _compare(model, files, folder, keys={**VARIANTS, **own}[name])


def pictures(family: str) -> None:
    """The same with a trained vision tower."""
    with _alone() as folder:
        model = save_tiny_vision_model(folder / "model", family, tied=False)
        files = tuple(write_pictures(folder / f"{each}.parquet", range(24)) for each in ("train", "test"))
        sizes = {"data__max_prompt_length": 48, ACTOR + "ppo_max_token_len_per_gpu": 128}
        # A tower attends through torch's own product, which has another kernel on each device.
        _compare(model, files, folder, keys=sizes | GAE, apart=1e-4, near=2e-4)
