"""Fixtures of tests that run whole steps in this process."""

import pytest

from tests.tiny import save_tiny_reward_model
from tests.trainer.steps import engine_is_off


@pytest.fixture
def make(process_group, twisted_trainer):
    """make(**changes): a trainer whose scores differ from answer to answer, and whose engine is a little off."""

    def trainer(**changes):
        made = twisted_trainer(**changes)
        engine_is_off(made)
        return made

    return trainer


@pytest.fixture
def reward_model(tmp_path):
    template = "{% for message in messages %}={{ message['content'] }}{% endfor %}"
    return save_tiny_reward_model(tmp_path / "reward_model", template)
