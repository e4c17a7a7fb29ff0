"""An engine's memory share is compared with the memory that the optimizers will leave, not with the free memory at the
start."""

from dataclasses import replace

import pytest
import torch

from rltrain.common.device import DEVICES
from rltrain.common.errors import ConfigError
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.workers.hybrid import check_room
from rltrain.workers.state.offload_manager import OffloadManager

VLLM = RolloutConfig(name="vllm", gpu_memory_utilization=0.5)


class Card:
    """A device of 100 MiB."""

    is_cpu, torch_device, free = False, torch.device("cpu"), 0

    def empty_cache(self) -> None: ...

    def new_stream(self) -> None: ...

    def free_memory_bytes(self) -> int:
        return self.free << 20

    def total_memory_bytes(self) -> int:
        return 100 << 20


def room(free: int, *, offload: bool = False) -> OffloadManager:
    """Return the memory with an optimizer over 4 MiB of weights, which will need 8."""
    found = OffloadManager(Card())
    found.device.free = free
    weights = torch.nn.Parameter(torch.zeros(1 << 20))
    found.add_optimizer(torch.optim.AdamW([weights]), offload=offload)
    return found


def test_the_optimizer_to_come_counts_at_the_engines_start():
    check_room(VLLM, room(free=58))
    with pytest.raises(ConfigError) as error:
        check_room(VLLM, room(free=57))
    assert "gpu_memory_utilization=0.48, or actor_rollout_ref.actor.fsdp_config.optimizer_offload" in str(error.value)
    check_room(VLLM, room(free=50, offload=True))
    # It holds its memory already.
    check_room(replace(VLLM, free_cache_engine=False), room(free=8))
    with pytest.raises(ConfigError, match=r"generate: .* Set actor_rollout_ref"):
        check_room(replace(VLLM, free_cache_engine=False), room(free=7))
    check_room(replace(VLLM, name="hf"), room(free=0))
    assert OffloadManager(DEVICES["cpu"]).future_optimizer_bytes() == 0
