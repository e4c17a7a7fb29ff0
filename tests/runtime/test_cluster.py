"""Devices and traffic of several nodes, on a cluster of raylets that claim to have NPUs."""

import os
import signal
from typing import Protocol

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations

from rltrain.common.columns.batch import Batch
from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import get_device
from rltrain.common.errors import ConfigError, NodesMissing, WorkerLost
from rltrain.runtime.calls import bind
from rltrain.runtime.cluster import ray_problems, reserve, way_in
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.samples import FETCH_SECONDS, Samples, whole
from tests.tiny import small_config


@pytest.fixture(scope="module", autouse=True)
def two_nodes(forked_workers):
    ray.shutdown()  # the plain one of other modules
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=4, resources={"NPU": 2}, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def settings(nnodes: int):
    config = small_config()
    config.trainer.nnodes, config.trainer.n_gpus_per_node = nnodes, 2
    config.ray_kwargs.ray_init["address"] = "auto"
    return config.cluster


def test_each_node_gives_its_own_devices():
    groups = reserve(settings(2), get_device("npu"))
    tables = [ray.util.placement_group_table(group) for group in groups]
    nodes = [set(table["bundles_to_node_id"].values()) for table in tables]
    assert [len(node) for node in nodes] == [1, 1]
    assert nodes[0] != nodes[1]
    assert all(bundle["NPU"] == 1.0 for table in tables for bundle in table["bundles"].values())
    for group in groups:
        ray.util.remove_placement_group(group)


def test_missing_nodes_are_counted_while_they_are_waited_for(caplog):
    caplog.set_level("INFO")
    with pytest.raises(
        NodesMissing, match="1 of 3 nodes with 2 free NPU slots each did not become available in 3 s"
    ) as caught:
        reserve(settings(3), get_device("npu"), within_s=3)
    assert caught.value.passing  # the supervisor does not take it for a crash loop
    assert "2 nodes with 2 + 2 NPU slots; the run needs 3 nodes with 2 each, so 1 more" in str(caught.value)
    assert "waiting for devices: the cluster has 2 nodes" in caplog.text
    assert "s left)" in caplog.text


def test_a_local_ray_without_the_devices_is_told_at_once():
    config = settings(1)
    config.ray_kwargs.ray_init["address"] = None
    with pytest.raises(ConfigError, match="n_gpus_per_node=2, but the local Ray has 0 GPU slots"):
        reserve(config, get_device("cuda"))


@pytest.mark.parametrize(
    ("nodes", "keys", "words"),
    [
        (1, {"_temp_dir": "/tmp", "num_cpu": 3}, ["ray_init.num_cpu'", "Did you mean ray_kwargs.ray_init.num_cpus?"]),
        (1, {"address": "127.0.0.1:1"}, ["address=127.0.0.1:1 (or RAY_ADDRESS) does not accept connections"]),
        (2, {}, ["trainer.nnodes=2 needs a running Ray cluster"]),
    ],
)
def test_problems_of_ray_kwargs_are_named_at_once(monkeypatch, nodes, keys, words):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = small_config()
    config.trainer.nnodes = nodes
    config.ray_kwargs.ray_init |= keys
    (problem,) = ray_problems(config.cluster)
    assert all(word in problem for word in words)


@pytest.mark.parametrize(
    ("address", "cause", "said"),
    [
        ("10.0.0.1:6379", "Unauthenticated: InvalidAuthToken: Authentication token is missing", "RAY_AUTH_TOKEN"),
        ("10.0.0.1:6379", "No node info found", "add this machine with `ray_start.sh worker`"),
        ("auto", "Could not find any running Ray instance", "This machine is not a node of a cluster. Start Ray with"),
        ("ray://10.0.0.1:6379", "ray client connection timeout", "Use the port of Ray's client server (10001"),
    ],
)
def test_an_error_of_ray_says_how_to_join(address, cause, said):
    error = ConnectionError("Failed to connect to Ray cluster")
    error.__cause__ = RuntimeError(cause)
    assert said in way_in(address, error)


class Toy(Protocol):
    """A role that makes rows, and reads rows of other workers."""

    def make(self) -> tuple[Batch, int]: ...
    def read(self, batch: Batch) -> list[float]: ...
    def waited(self) -> list[str]: ...


# Small objects go through the driver, as Ray has it.
LENGTH = 200_000


class ToyWorker(Toy):
    def __init__(self) -> None:
        self.roles = [self]

    def make(self):
        """Return three rows with the numbers 10, 11, 12, made on rank 1."""
        first = 10 * torch.distributed.get_rank()
        return Batch({"tokens": Ragged.from_rows([torch.full((LENGTH,), first + i) for i in range(3)])}), os.getpid()

    def read(self, batch: Batch):
        return [float(row.double().mean()) for row in batch.ragged("tokens").rows()]

    def waited(self):
        return [call for call, seconds in FETCH_SECONDS.items() if seconds > 0]


def test_a_row_alone_goes_to_the_node_that_reads_it():
    """If a node is lost, the error names it, not the node that waits for its rows."""
    placement = [ray.util.placement_group([{"CPU": 4}], strategy="STRICT_PACK") for _ in range(2)]
    group = WorkerGroup("toy", placement, get_device("cpu"), threads=1)
    group.start("tests.runtime.test_cluster:ToyWorker", {})
    assert group.nodes == [0, 1]
    made, pids = zip(*group.call(Toy.make), strict=True)
    samples = Samples(6)
    for rank, ref in enumerate(made):
        samples.attach([whole(ref, ("tokens",), 3 * rank + np.arange(3), group.nodes[rank])])
    requests = [samples.request(np.array(ids), ["tokens"]).as_batch for ids in ([0, 4, 1], [5, 3, 4])]
    calls = [bind(Toy.read, request) for request in requests]
    assert group.submit(calls).collect() == [[0, 11, 1], [12, 10, 11]]
    assert group.bytes_between_nodes() == {"Toy.read": 8 * LENGTH + 8}
    (waited, _) = group.call(Toy.waited)
    assert "Toy.read" in waited, "a rank counts the seconds in which it waits for rows"
    assert [len(found["node_ids"]) for found in get_object_locations(list(made)).values()] == [1, 1]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLost, match=rf"toy worker, rank 1 of 2 \(pid {pids[1]} .*: the process died"):
        group.submit(calls[:1] * 2).collect()
    for each in placement:
        ray.util.remove_placement_group(each)
