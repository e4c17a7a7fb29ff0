"""What workers find in their environment."""

import math

import pytest

from rltrain import device
from rltrain.device import threads_per_worker
from rltrain.env import cpu_quota, worker_environment


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_what_the_user_has_set_is_left_alone(device, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = worker_environment(device, threads=8)
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["TOKENIZERS_PARALLELISM"] == "false"


def test_a_workers_threads_are_the_users_choice_or_its_share_of_the_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_worker(2) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(device, "cpu_quota", lambda: math.inf)
    assert [threads_per_worker(count) for count in (1, 4, 100)] == [12, 3, 1]
    monkeypatch.setattr(device, "cpu_quota", lambda: 6.5)
    assert [threads_per_worker(count) for count in (1, 4)] == [6, 1]


@pytest.mark.parametrize(("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", math.inf), (None, math.inf)])
def test_the_quota_of_a_container_counts(tmp_path, text, cores):
    if text:
        (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path / "cpu.max") == cores


def test_offline_driver_means_offline_workers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    found = worker_environment("cpu", threads=1)
    assert found["HF_HUB_OFFLINE"] == "1"
    assert "HF_ENDPOINT" not in found
