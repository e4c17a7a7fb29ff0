"""The number-guessing environment: its replies, its rewards, and that halving the range finds the number."""

import pytest

from rltrain.agents.ready.guess import Guess

ROW = {"data_source": "rltrain/guess_number", "extra_info": {"low": 1, "high": 31, "number": 17}, "ground_truth": "17"}


def begun(**keys):
    game = Guess(**keys)
    game.reset(ROW, 0)
    return game


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ("16", ("higher", 0.0, False)),
        ("Not 16 but 20.", ("lower", 0.0, False)),
        ("17", ("correct", 1.0, True)),
        ("<think>1 to 31</think> I say 17!", ("correct", 1.0, True)),
        ("-17", ("Say a number from 1 to 31.", 0.0, False)),
        ("9" * 10_000, ("Say a number from 1 to 31.", 0.0, False)),
    ],
)
def test_a_turn_is_answered_by_its_last_number(turn, told):
    assert begun().step(turn) == told


def test_the_score_falls_with_each_guess():
    game = begun(cost=0.25)
    assert game.score() == {"score": 0.0, "found": 0.0, "guesses": 0.0}
    for turn in ("1", "nothing"):
        assert game.step(turn)[1:] == (0.0, False)
    assert game.step("17") == ("correct", 0.5, True)
    assert game.score() == {"score": 0.5, "found": 1.0, "guesses": 3.0}
    for _ in range(9):
        game.step("17")
    assert game.score()["score"] == 0.0
    game.reset(ROW, 1)
    assert game.score() == {"score": 0.0, "found": 0.0, "guesses": 0.0}
