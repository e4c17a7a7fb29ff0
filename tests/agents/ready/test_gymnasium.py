"""Gymnasium environments as conversations, and the errors for a missing package or environment."""

import sys

import pytest

from rltrain.agents.ready.frozen_lake import FrozenLake
from rltrain.agents.ready.gymnasium import TextEnv
from rltrain.common.errors import ConfigError, DataError

MAP = ["SFFF", "FHFH", "FFFH", "HFFG"]
ROW = {"extra_info": {"seed": 3, "make": {"desc": MAP}}}
OWN = """
def seen(env, observation):
    return f"at {observation}"

def read(text, env):
    return len(text) if len(text) < 4 else None
"""


def played(game, *turns):
    return [game.step(turn) for turn in turns]


def test_a_lake_is_crossed_by_words():
    lake = FrozenLake()
    assert lake.first(ROW) == "PFFF\nFHFH\nFFFH\nHFFG"
    lake.reset(ROW, 0)
    told = played(lake, "I go down", "Not up but DOWN", "right", "down", "right", "right.")
    assert told[0] == ("SFFF\nPHFH\nFFFH\nHFFG", 0.0, False)
    assert told[-1] == ("SFFF\nFHFH\nFFFH\nHFFP\nYou reached the goal.", 1.0, True)
    assert lake.score() == {"score": 1.0, "steps": 6.0}
    lake.close()


def test_hole_ends_the_episode_and_invalid_actions_get_a_hint():
    lake = FrozenLake()
    lake.reset(ROW, 0)
    assert lake.step("fly") == ("That is not an action. Say one of left, down, right, up.", 0.0, False)
    told = played(lake, "right", "down")
    assert told[-1] == ("SFFF\nFPFH\nFFFH\nHFFG\nYou fell into a hole.", 0.0, True)
    assert lake.score() == {"score": 0.0, "steps": 3.0}


def test_a_slippery_lake_repeats_itself_by_the_seed_of_its_row():
    def path(seed, group):
        lake = FrozenLake(slippery=True)
        lake.reset({"extra_info": ROW["extra_info"] | {"seed": seed}}, group)
        return [observation for observation, *_ in played(lake, *["left", "up"] * 6)]

    assert path(1, 0) == path(1, 9)
    assert len({tuple(path(seed, 0)) for seed in range(6)}) > 1


def test_rendering_and_reading_may_be_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = {"render": f"{tmp_path}/own.py:seen", "parse": f"{tmp_path}/own.py:read"}
    cliff = TextEnv("CliffWalking-v1", **own)
    assert cliff.first({}) == "at 36"
    assert played(cliff, "", "1234") == [("at 24", -1.0, False), ("That is not an action.", 0.0, False)]
    with pytest.raises(ConfigError, match=r"environment_kwargs\.render="):
        TextEnv("CliffWalking-v1", render=f"{tmp_path}/own.py:nothing")


def test_a_row_sets_only_arguments_that_the_configuration_names():
    """No argument of a row may name a module, a file or a wrapper."""
    row = {"extra_info": {"make": {"max_episode_steps": 1, "desc": None}}}
    for game in (FrozenLake(), TextEnv("CliffWalking-v1")):
        with pytest.raises(DataError, match=r"extra_info\.make\.max_episode_steps of a row is not allowed"):
            game.reset(row, 0)
    allowed = TextEnv("CliffWalking-v1", make_from_row=["max_episode_steps"])
    allowed.reset(row, 0)
    assert allowed.step("1")[2]


def test_missing_gymnasium_and_unknown_environments_are_errors(monkeypatch):
    with pytest.raises(ConfigError, match=r"environment_kwargs\.env_id=Lake-v1: gymnasium reports: "):
        TextEnv("Lake-v1")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"pip install gymnasium, or rltrain\[gymnasium\]"):
        FrozenLake()
