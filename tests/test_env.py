"""What workers find in their environment."""

import pytest

from rltrain.env import worker_environment


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_what_the_user_has_set_is_left_alone(device, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = worker_environment(device, threads=8)
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["TOKENIZERS_PARALLELISM"] == "false"


def test_offline_driver_means_offline_workers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    found = worker_environment("cpu", threads=1)
    assert found["HF_HUB_OFFLINE"] == "1"
    assert "HF_ENDPOINT" not in found
