"""Devices of several nodes, on a cluster of raylets that claim to have NPUs; what goes from one to another."""

import os
import signal
from typing import Protocol

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations

from rltrain.base.columns.batch import Batch
from rltrain.base.columns.ragged import Ragged
from rltrain.base.device import get_device
from rltrain.base.errors import ConfigError, NodesMissing, WorkerError, WorkerLost
from rltrain.controller import cluster as subject
from rltrain.controller.calls import bind
from rltrain.controller.cluster import ray_problems, reserve
from rltrain.controller.group import WorkerGroup
from rltrain.controller.samples import Samples, whole
from tests.tiny import small_config


@pytest.fixture(scope="module", autouse=True)
def two_nodes(forked_workers):
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
    return config


def test_each_node_gives_its_own_devices():
    groups = reserve(settings(2), get_device("npu"))
    tables = [ray.util.placement_group_table(group) for group in groups]
    nodes = [set(table["bundles_to_node_id"].values()) for table in tables]
    assert [len(node) for node in nodes] == [1, 1]
    assert nodes[0] != nodes[1]
    assert all(bundle["NPU"] == 1.0 for table in tables for bundle in table["bundles"].values())
    for group in groups:
        ray.util.remove_placement_group(group)


def test_nodes_that_do_not_come_up_are_counted(monkeypatch):
    monkeypatch.setattr(subject, "RESERVE_TIMEOUT_S", 3)
    with pytest.raises(NodesMissing, match="1 of 3 nodes with 2 free NPU slots each did not come up in 3 s") as caught:
        reserve(settings(3), get_device("npu"))
    assert caught.value.passing  # the supervisor does not take it for a crash loop
    assert "2 nodes with 2 + 2 NPU slots; 3 x 2 on one node each are asked for, so 1 more" in str(caught.value)


def test_what_is_missing_is_said_while_it_is_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(subject, "RESERVE_TIMEOUT_S", 3)
    caplog.set_level("INFO")
    with pytest.raises(WorkerLost):
        reserve(settings(3), get_device("npu"))
    assert "waiting for devices: the cluster has 2 nodes" in caplog.text
    assert "s left)" in caplog.text


def test_a_local_ray_without_the_devices_is_told_at_once():
    config = settings(1)
    config.ray_kwargs.ray_init["address"] = None
    with pytest.raises(ConfigError, match="n_gpus_per_node=2, but the local Ray has 0 GPU slots"):
        reserve(config, get_device("cuda"))


def test_arguments_ray_does_not_have_are_named():
    config = small_config()
    config.ray_kwargs.ray_init |= {"_temp_dir": "/tmp", "object_store_memory": 1, "runtime_env": {}, "num_cpu": 3}
    (problem,) = ray_problems(config)
    assert "ray_init.num_cpu'" in problem
    assert "Did you mean ray_kwargs.ray_init.num_cpus?" in problem


def test_a_cluster_that_does_not_answer_is_told_at_once():
    config = small_config()
    config.ray_kwargs.ray_init["address"] = "127.0.0.1:1"
    (problem,) = ray_problems(config)
    assert "address=127.0.0.1:1 (or RAY_ADDRESS): nobody answers there" in problem


@pytest.mark.parametrize(
    ("address", "cause", "said"),
    [
        (
            "10.0.0.1:6379",
            "Unauthenticated: RPC error: InvalidAuthToken: Authentication token is missing",
            "RAY_AUTH_TOKEN",
        ),
        ("10.0.0.1:6379", "No node info found", "make this one a node (ray_start.sh worker), or set"),
        (
            "auto",
            "Could not find any running Ray instance",
            "This machine is no node of a cluster: start Ray with scripts/",
        ),
        ("ray://10.0.0.1:6379", "ray client connection timeout", "Its port is that of Ray's client server (10001"),
    ],
)
def test_what_keeps_a_driver_out_is_told(monkeypatch, address, cause, said):
    def fail(**arguments):
        raise ConnectionError("Failed to connect to Ray cluster") from RuntimeError(cause)

    monkeypatch.setattr(subject.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(subject.ray, "init", fail)
    monkeypatch.setattr(subject, "ray_problems", lambda config: [])
    monkeypatch.setattr(subject, "_use_token", lambda: None)
    config = small_config()
    config.ray_kwargs.ray_init["address"] = address
    with pytest.raises(ConfigError) as caught:
        subject.start_ray(config)
    assert f"ray.init(address={address}) failed" in str(caught.value)
    assert said in str(caught.value)


def test_several_nodes_need_a_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = settings(2)
    config.ray_kwargs.ray_init["address"] = None
    (problem,) = ray_problems(config)
    assert "trainer.nnodes=2 needs a running Ray cluster" in problem


class Toy(Protocol):
    """Makes rows, and reads rows that others have made."""

    def make(self) -> tuple[Batch, int]: ...
    def read(self, batch: Batch) -> list[float]: ...


# Small objects go through the driver, as Ray has it.
LENGTH = 200_000


class ToyWorker(Toy):
    def __init__(self) -> None:
        self.roles = [self]

    def make(self):
        """Three rows of the numbers 10, 11, 12 on rank 1."""
        first = 10 * torch.distributed.get_rank()
        return Batch({"tokens": Ragged.from_rows([torch.full((LENGTH,), first + i) for i in range(3)])}), os.getpid()

    def read(self, batch: Batch):
        return [float(row.double().mean()) for row in batch.ragged("tokens").rows()]


def test_a_row_alone_goes_to_the_node_that_reads_it(monkeypatch):
    """A node that cannot cut says why. One that is gone is named, not the one that waits for its rows."""
    placement = [ray.util.placement_group([{"CPU": 4}], strategy="STRICT_PACK") for _ in range(2)]
    group = WorkerGroup("toy", placement, get_device("cpu"), threads=1)
    group.start("tests.controller.test_cluster:ToyWorker", {})
    assert group.nodes == [0, 1]
    made, pids = zip(*group.call(Toy.make), strict=True)
    samples = Samples(6)
    for rank, ref in enumerate(made):
        samples.attach([whole(ref, ("tokens",), 3 * rank + np.arange(3), group.nodes[rank])])
    requests = [samples.request(np.array(ids), ["tokens"]).as_batch for ids in ([0, 4, 1], [5, 3, 4])]
    calls = [bind(Toy.read, request) for request in requests]
    assert group.submit(calls).collect() == [[0, 11, 1], [12, 10, 11]]
    assert group.bytes_between_nodes() == 8 * LENGTH + 8
    assert [len(found["node_ids"]) for found in get_object_locations(list(made)).values()] == [1, 1]
    wrong = samples.request(np.array([4]), ["tokens"])
    wrong.parts[0].rows[:] = 7
    monkeypatch.setattr(group, "kill", lambda: None)
    with pytest.raises(WorkerError, match="IndexError"):
        group.submit([bind(Toy.read, wrong.as_batch)] * 2).collect()
    monkeypatch.undo()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLost, match=rf"toy worker, rank 1 of 2 \(pid {pids[1]} .*: the process died"):
        group.submit(calls[:1] * 2).collect()
    for each in placement:
        ray.util.remove_placement_group(each)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("A worker died. It had\nthe number 7.", "Ray: A worker died"),
        ("Traceback (most recent call last):\n  File \"a.py\"\nMemoryError: no buffer. Of Ray.\nA task failed.",
         "Ray: MemoryError: no buffer"),
    ],
)  # fmt: skip
def test_what_ray_says_is_one_line_and_no_traceback(caplog, said, told):
    subject.first_sentence({"lines": [said]})
    assert [record.getMessage() for record in caplog.records] == [told]
