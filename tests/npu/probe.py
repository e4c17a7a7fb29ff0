"""A policy loss equal to the default one. Every worker loads it before its models, and with it two things:

- the CPU computes attention as the NPU does, so that two runs differ in nothing but the device;
- what lies on the device is written down, phase by phase, into RLTRAIN_STANDIN_REPORT.
"""

import dataclasses
import json
import os
from pathlib import Path
from unittest import mock

import torch

from rltrain.algorithms.policy_losses import POLICY_LOSSES, policy_loss
from rltrain.common.device import DEVICES
from rltrain.workers.state.offload_manager import OffloadManager


@policy_loss(silent_at_zero=True)
def usual(inputs, cfg):
    """PPO's clip."""
    return POLICY_LOSSES["vanilla"].function(inputs, cfg)


DEVICES["cpu"] = dataclasses.replace(DEVICES["cpu"], attention="npu")
_enter = OffloadManager.enter_phase


def _reported(self, phase, **how):
    """`OffloadManager.enter_phase`, with the bytes before, during and after it, and the peak since the last one."""
    torch.npu.empty_cache()
    before, peak = torch.npu.memory_allocated(), torch.npu.max_memory_allocated()
    torch.npu.reset_peak_memory_stats()
    with mock.patch.object(torch.npu, "reset_peak_memory_stats"):  # which it calls behind the move
        _enter(self, phase, **how)
    line = {"phase": phase, "before": before, "peak_of_last": peak, "after": torch.npu.memory_allocated(),
            "peak_of_move": torch.npu.max_memory_allocated()}  # fmt: skip
    with (Path(os.environ["RLTRAIN_STANDIN_REPORT"]) / f"{os.environ['RANK_OF_REPORT']}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    torch.npu.reset_peak_memory_stats()


if "RLTRAIN_STANDIN_REPORT" in os.environ and "npu" in dir(torch):
    os.environ["RANK_OF_REPORT"] = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "none")
    OffloadManager.enter_phase = _reported
