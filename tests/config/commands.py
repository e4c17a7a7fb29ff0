"""Commands as users type them, for tests of the configuration, and rltrain's messages on them."""

import re

import pytest

from rltrain.api import check_settings
from rltrain.common.errors import ConfigError
from rltrain.config.check import check
from rltrain.config.load import LoadedConfig, load_config
from rltrain.config.notes import other_meanings
from rltrain.config.schema.keys import get

A = "actor_rollout_ref."
# The arguments that a valid command needs.
BASE = [
    f"{A}model.path=m", "data.train_files=t.parquet", "algorithm.adv_estimator=grpo", f"{A}rollout.n=4",
    "trainer.n_gpus_per_node=8",
]  # fmt: skip


def words(*commands: str) -> list[str]:
    """The arguments of command lines. actor., rollout., ref. and model. stand for the sections of actor_rollout_ref."""
    typed = [word for command in commands for word in command.split()]
    return [re.sub(r"^([~+]*)(actor|rollout|ref|model)\.", rf"\1{A}\2.", word) for word in typed]


def load(*commands: str) -> LoadedConfig:
    """Return a checked configuration: the valid command with more arguments."""
    loaded = load_config([*BASE, *words(*commands)])
    check(loaded)
    return loaded


def value(key: str, *commands: str):
    """Return the unchecked value of a key."""
    return get(load_config([*BASE, *words(*commands)]).config, *words(key))


def notes(*commands: str) -> list[str]:
    """Return the notes on keys without effect, and on other names and meanings."""
    return check_settings(load_config([*BASE, *words(*commands)]))


def meanings(*commands: str) -> list[str]:
    """Return the notes on keys whose meaning differs from verl's."""
    return list(other_meanings(load(*commands)))


def problems(*commands: str, files: tuple[str, ...] = ()) -> list[str]:
    """Return the lines of the error."""
    with pytest.raises(ConfigError) as caught:
        check(load_config([*BASE, *words(*commands)], files))
    return str(caught.value).splitlines()
