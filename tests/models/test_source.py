"""A model on an unreachable hub is reported at once, or read from the cache."""

import socket

import huggingface_hub
import pytest

from rltrain.models.files import source

KEY = "actor_rollout_ref.model.path"


@pytest.fixture
def dead_hub(monkeypatch):
    """The hub is at a port without a server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(source, "work_offline", lambda: None)
    return address


def test_a_hub_that_is_down_is_told_at_once(dead_hub):
    problem = source.model_problem(KEY, "some/model")
    assert f"{KEY}=some/model: the folder does not exist, and {dead_hub} cannot be reached" in problem
    assert "Give a folder" in problem


def test_a_cached_model_is_taken_when_the_hub_is_down(dead_hub, tiny_model, monkeypatch, caplog):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(tiny_model / "config.json"))
    assert source.model_problem(KEY, "some/model") is None
    assert "is taken from the cache" in caplog.text
    assert huggingface_hub.constants.HF_HUB_OFFLINE
