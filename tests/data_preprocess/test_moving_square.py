"""Moving squares: frames move in the direction of the answer, and rows of the control differ only in their order."""

from collections import Counter

import numpy as np
import pytest

from rltrain.data.images import open_image
from rltrain.data_preprocess import moving_square
from rltrain.rewards.scorers.registry import find_scorer

pytest.importorskip("PIL")
STEPS = {"1": (-1, 0), "2": (0, 1), "3": (1, 0), "4": (0, -1)}  # of rows and columns


def places(row) -> list[tuple[int, int]]:
    """Return the first row and column of pixels of the square in each frame."""
    (video,) = row["videos"]
    found = [np.nonzero((np.asarray(open_image(frame)) != 255).any(-1)) for frame in video["video"]]
    assert {len(np.unique(each)) for place in found for each in place} == {28}
    return [tuple(int(each.min()) for each in place) for place in found]


def test_frames_move_in_the_direction_of_the_answer():
    rows = [row for split in moving_square.generate(60, 12, seed=1).values() for row in split]
    answers = [row["reward_model"]["ground_truth"] for row in rows]
    for row, answer in zip(rows, answers, strict=True):
        steps = np.diff(places(row), axis=0)
        assert {tuple(step) for step in np.sign(steps)} == {STEPS[answer]}
        axis = int(steps.any(0)[1])
        assert sorted(place[axis] for place in places(row)) == [0, 9, 18, 28], "both directions use the same positions"
        assert find_scorer(row["data_source"])(answer, answer, row["extra_info"]) == 1.0
    assert Counter(answers) == dict.fromkeys("1234", 18)


def test_shuffled_rows_differ_in_the_order_of_frames_alone():
    rows = [moving_square.generate(60, 0, seed=0, shuffled=each)["train"] for each in (False, True)]
    for row, other in zip(*rows, strict=True):
        assert sorted(places(row)) == sorted(places(other))
        assert row | {"videos": None} == other | {"videos": None}
    assert sum(places(row) != places(other) for row, other in zip(*rows, strict=True)) > 50
