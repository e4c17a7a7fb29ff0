"""A driver without training: joins a cluster by its settings, and prints as JSON what its workers see."""

import json
import os
import socket
import sys
from typing import Any, Protocol

import torch.distributed as dist

from rltrain.common.device import get_device, threads_per_worker
from rltrain.common.errors import RltrainError
from rltrain.config.load import load_config
from rltrain.runtime.cluster import ray_logs, reserve, start_ray
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.ray_watchdog import stop_ray

PREFIXES = ("GLOO_", "HCCL_", "HF_", "NCCL_", "OMP_NUM", "PYTORCH_", "VLLM_", "WANDB_", "MINE")


class Look(Protocol):
    """The role of a worker that inspects its environment."""

    def look(self) -> dict[str, Any]: ...


class Looker(Look):
    """A worker that inspects its environment."""

    def __init__(self) -> None:
        self.roles = [self]

    def look(self) -> dict[str, Any]:
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, socket.gethostname())
        variables = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
        return {"node": socket.gethostname(), "nodes": names, "variables": variables}


def main(argv: list[str]) -> int:
    try:
        cfg = load_config(argv).config
        device = get_device("cpu")
        start_ray(cfg.cluster)
        try:
            threads = threads_per_worker(cfg.trainer.n_gpus_per_node)
            group = WorkerGroup("hybrid", reserve(cfg.cluster, device), device, threads)
            group.start("tests.hosts.look:Looker", {})
            found = {"ranks": group.call(Look.look), "logs": ray_logs(), "driver": socket.gethostname()}
            sys.stdout.write(f"found {json.dumps(found)}\n")
            group.stop()
        finally:
            stop_ray()
    except RltrainError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    from tests.hosts import look

    # By its own name, under which the workers know it.
    sys.exit(look.main(sys.argv[1:]))
