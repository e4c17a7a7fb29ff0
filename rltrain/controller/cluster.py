"""The Ray cluster: start or join it, and reserve the devices of a run."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from rltrain.config.schema import Config
from rltrain.device import Device
from rltrain.env import prepare_driver, ray_address
from rltrain.errors import ConfigError, WorkerLost
from rltrain.logs import count

_RESERVE_TIMEOUT_S = 120
_POLL_S = 0.5


def start_ray(cfg: Config, device: Device) -> None:
    """Join the cluster at ``ray_kwargs.ray_init.address`` (or RAY_ADDRESS), else start a local one.

    On a local CPU run each worker takes one CPU slot, so there are as many slots as workers ask for, whatever the machine.
    """
    init = cfg.ray_kwargs.ray_init
    address = init.address or ray_address()
    prepare_driver()
    if address:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        return
    if cfg.trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes={cfg.trainer.nnodes} needs a running Ray cluster. Start it with scripts/ray_start.sh on every node, "
            "then set ray_kwargs.ray_init.address=auto."
        )
    num_cpus = init.num_cpus or max(os.cpu_count() or 1, cfg.trainer.n_gpus_per_node)
    # "local": not one that happens to run on this machine.
    ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


def reserve(cfg: Config, device: Device) -> list[PlacementGroup]:
    """One placement group a node, with one bundle a device. Raises WorkerLost when they do not come up."""
    trainer = cfg.trainer
    bundle = {"CPU": 1.0} if device.is_cpu else {"CPU": 1.0, device.ray_resource: 1.0}
    groups = [
        placement_group([dict(bundle)] * trainer.n_gpus_per_node, strategy="STRICT_PACK") for _ in range(trainer.nnodes)
    ]
    waiting, deadline = [group.ready() for group in groups], time.monotonic() + _RESERVE_TIMEOUT_S
    while waiting and time.monotonic() < deadline:  # in short looks: a signal is heard between them
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
    if waiting:
        have = {
            name: amount for name, amount in ray.cluster_resources().items() if name in ("CPU", device.ray_resource)
        }
        raise WorkerLost(
            f"{len(waiting)} of {count(trainer.nnodes, 'node')} with {trainer.n_gpus_per_node} free {device.ray_resource} slots each "
            f"did not come up in {_RESERVE_TIMEOUT_S} s. The cluster has {have} on {count(len(ray.nodes()), 'node')}. "
            "Check trainer.nnodes and trainer.n_gpus_per_node, or start the missing nodes."
        )
    return groups


def ray_logs() -> str:
    """The folder where Ray keeps what its processes said, on this node; on others it has the same name."""
    node: Any = ray._private.worker._global_node
    return node.get_logs_dir_path()


def share(value: Any) -> ray.ObjectRef:
    """Put ``value`` into the object store once; workers that get the reference read it from there."""
    return ray.put(value)


def stop_ray() -> None:
    """Leave the cluster; a local one ends."""
    ray.shutdown()
