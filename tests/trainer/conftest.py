"""Fixtures for tests of complete steps in this process, and of checkpoints."""

import shutil

import pytest

from rltrain.run.checkpoints.folder import RunFolder
from tests.clock import VirtualClock
from tests.tiny import save_tiny_reward_model
from tests.tiny_tools import save_calling_model
from tests.tiny_vision import FAMILIES, save_tiny_vision_model, write_pictures
from tests.trainer.steps import engine_is_off, save_moe


@pytest.fixture
def make(process_group, twisted_trainer):
    """make(**changes): return a trainer with different scores per response, and an engine whose log-probs differ
    slightly."""

    def trainer(**changes):
        made = twisted_trainer(**changes)
        engine_is_off(made)
        return made

    return trainer


@pytest.fixture
def reward_model(tmp_path):
    template = "{% for message in messages %}={{ message['content'] }}{% endfor %}"
    return save_tiny_reward_model(tmp_path / "reward_model", template)


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def folder(tmp_path, clock):
    folder = RunFolder(str(tmp_path / "run"), clock)
    yield folder
    folder.release()


@pytest.fixture
def free(monkeypatch):
    """free(n): set the free disk space to n bytes."""
    usage, room = type(shutil.disk_usage("/")), [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, room[0]))
    return lambda num_bytes: room.__setitem__(0, num_bytes)


@pytest.fixture(scope="session")
def calling(tmp_path_factory):
    """A model that calls tools."""
    return save_calling_model(tmp_path_factory.mktemp("calling") / "model")


@pytest.fixture(scope="session")
def moe(tmp_path_factory):
    return save_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="session")
def vision_models(tmp_path_factory):
    """Tiny vision models, by family."""
    folder = tmp_path_factory.mktemp("vision")
    return {family: save_tiny_vision_model(folder / family, family, tied=False) for family in FAMILIES}


@pytest.fixture(scope="session")
def picture_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return write_pictures(folder / "train.parquet", range(24)), write_pictures(folder / "test.parquet", range(24, 30))
