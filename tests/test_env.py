"""The environment variables of workers."""

import math
import os
import sys

import pytest

from rltrain.common.device import threads_per_worker
from rltrain.common.env import (
    cpu_quota,
    driver_environment,
    memory_left,
    prepare_driver,
    see_own_device,
    use_interface,
    worker_environment,
)
from rltrain.config.load import load_config, to_yaml


def test_secrets_for_workers_stay_out_of_rays_runtime_environment(monkeypatch):
    given = {"MY_API_KEY": "abc", "MY_DSN": "abc", "MY_URL": "http://me:abc@h", "MY_SEED": "3"}
    for name in given:
        monkeypatch.setenv(name, "")
    assert prepare_driver(**given) == {"MY_SEED": "3"}
    assert given.items() - {("MY_SEED", "3")} <= driver_environment().items()


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_what_the_user_has_set_is_left_alone(device, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = worker_environment(device, threads=8)
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.parametrize(
    ("device", "engine", "graphs", "queue", "grows"),
    [
        # torch_npu captures no graph under level 2 of its task queue.
        ("npu", "vllm", True, "1", None),
        ("npu", "vllm", False, "2", None),
        ("npu", "hf", False, "2", "PYTORCH_NPU_ALLOC_CONF"),
        ("cuda", "vllm", True, None, "PYTORCH_CUDA_ALLOC_CONF"),
        ("cuda", "sglang", True, None, None),
        ("cpu", "hf", False, None, None),
    ],
)
def test_the_engine_decides_queue_and_allocator(device, engine, graphs, queue, grows, monkeypatch):
    for name in ("TASK_QUEUE_ENABLE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    found = worker_environment(device, 1, engine, graphs=graphs)
    assert found.get("TASK_QUEUE_ENABLE") == queue
    assert {name: value for name, value in found.items() if "ALLOC_CONF" in name} == (
        {grows: "expandable_segments:True"} if grows else {}
    )
    # It would keep the all-gathers of FSDP2 from overlapping with computation.
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in found
    # The variable of all devices is the same choice.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")
    found = worker_environment(device, 1, engine, graphs=graphs)
    assert not any("ALLOC_CONF" in name for name in found)
    assert found.get("TASK_QUEUE_ENABLE") in (None, "0")


def test_a_worker_sees_its_device_where_ray_hides_none(monkeypatch):
    # Set and deleted, so that it is put back afterwards.
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    see_own_device({})
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("ASCEND_RT_VISIBLE_DEVICES")) == ("4,5,6,7", None)
    see_own_device({"GPU": ["6"], "NPU": ["3"]})
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["ASCEND_RT_VISIBLE_DEVICES"]) == ("6", "3")


def test_threads_are_the_users_choice_or_a_share_of_the_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_worker(2) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = min(len(os.sched_getaffinity(0)), cpu_quota())
    assert [threads_per_worker(count) for count in (1, 10**6)] == [max(1, int(cores)), 1]


@pytest.mark.parametrize(
    ("device", "devices_per_engine", "visible", "has_vllm", "engine"),
    [
        ("cpu", 2, "", False, "vllm"),
        ("auto", 1, "0,1", True, "vllm"),
        # The driver may run on a node without devices.
        ("npu", 1, "", True, "vllm"),
        ("npu", 4, "", False, "vllm"),
    ],
)
def test_the_default_engine(monkeypatch, tmp_path, device, devices_per_engine, visible, has_vllm, engine):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    if not has_vllm:
        monkeypatch.setitem(sys.modules, "vllm", None)
    rollout = "actor_rollout_ref.rollout"
    keys = [f"trainer.device={device}", f"{rollout}.tensor_model_parallel_size={devices_per_engine}"]
    config = load_config(keys).config
    # As config.yaml and the workers have it.
    assert f"name: {engine}" in to_yaml(config)
    assert load_config([*keys, f"{rollout}.name=sglang"]).config.actor_rollout_ref.rollout.name == "sglang"


@pytest.mark.parametrize(("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", math.inf), (None, math.inf)])
def test_the_quota_of_a_container_counts(tmp_path, text, cores):
    if text:
        (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path / "cpu.max") == cores


def test_offline_driver_means_offline_workers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    found = driver_environment()
    assert found["HF_HUB_OFFLINE"] == "1"
    assert "HF_ENDPOINT" not in found


@pytest.mark.parametrize(("library", "card"), [("GLOO", "lo"), ("NCCL", "=lo"), ("HCCL", "=lo")])
def test_nodes_meet_on_the_card_with_their_address(library, card, monkeypatch):
    name = f"{library}_SOCKET_IFNAME"
    for other in ("GLOO", "NCCL", "HCCL"):
        # Set and deleted, so that it is put back afterwards.
        monkeypatch.setenv(f"{other}_SOCKET_IFNAME", "mine")
    use_interface("127.0.0.1", 2)
    assert os.environ[name] == "mine"
    monkeypatch.delenv(name)
    use_interface("203.0.113.9", 2)
    assert name not in os.environ
    use_interface("127.0.0.1", 2)
    assert os.environ[name] == card


@pytest.mark.parametrize(
    ("variables", "device", "count"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, "auto", 2),
        ({"CUDA_VISIBLE_DEVICES": "0,3", "SLURM_GPUS_ON_NODE": "8"}, "cuda", 2),
        ({"SLURM_GPUS_ON_NODE": "8"}, "npu", 8),
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, "cpu", 1),
    ],
)
def test_devices_are_counted_unless_a_number_is_given(variables, device, count, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked = [f"trainer.device={device}"]
    assert load_config(asked).config.trainer.n_gpus_per_node == count
    assert load_config([*asked, "trainer.n_gpus_per_node=5"]).config.trainer.n_gpus_per_node == 5


def test_the_memory_limit_of_a_container_is_known(tmp_path):
    assert memory_left(tmp_path) == math.inf
    for name, text in (("max", "1000\n"), ("current", "900\n"), ("stat", "anon 400\ninactive_file 300\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory_left(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_left(tmp_path) == math.inf


def test_the_least_memory_limit_on_the_way_up_counts(tmp_path):
    root, mine = tmp_path / "root", tmp_path / "cgroup"
    of_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for folder, (limit, used, files), size in (
        ("slurm/job_1", ("memory.max", "memory.current", "inactive_file"), 500),
        ("slurm/job_1/step_0", ("memory.max", "memory.current", "inactive_file"), 800),
        ("memory/slurm/job_1", of_1, 300),
    ):
        (root / folder).mkdir(parents=True)
        for name, text in ((limit, size), (used, 200), ("memory.stat", f"{files} 50")):
            (root / folder / name).write_text(f"{text}\n")
    mine.write_text("0::/slurm/job_1/step_0\n")
    assert memory_left(root, mine) == 350
    mine.write_text("5:cpu,cpuacct:/slurm\n4:memory:/slurm/job_1/step_0\n0::/\n")
    assert memory_left(root, mine) == 150
