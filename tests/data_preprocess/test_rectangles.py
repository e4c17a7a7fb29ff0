"""Rectangles on squared paper: the drawing matches the question, and rows of the control differ only in the image."""

from collections import Counter

import numpy as np
import pytest

from rltrain.data.images import open_image
from rltrain.data_preprocess import rectangles
from rltrain.rewards.scorers.registry import find_scorer

pytest.importorskip("PIL")


def pixels(row):
    (image,) = row["images"]
    return np.asarray(open_image(image))


def answer(row):
    return row["reward_model"]["ground_truth"]


def test_the_answer_is_the_number_of_squares_with_ink():
    rows = [row for split in rectangles.generate(60, 12, seed=1).values() for row in split]
    middles = slice(rectangles.SQUARE // 2, None, rectangles.SQUARE)
    for row in rows:
        assert answer(row) == str((pixels(row)[middles, middles] != 255).any(-1).sum())
        assert find_scorer(row["data_source"])(answer(row), answer(row), row["extra_info"]) == 1.0
    assert Counter(map(answer, rows)) == dict.fromkeys("123469", 12)


def test_no_held_out_picture_is_in_train():
    rows = rectangles.generate(600, 60, seed=0)
    train, test = ({pixels(row).tobytes() for row in rows[split]} for split in ("train", "test"))
    assert (len(train), len(test)) == (600, 60)
    assert not train & test


def test_blank_rows_differ_in_the_picture_alone():
    for seen, blank in zip(
        *(rectangles.generate(60, 0, seed=0, blank=each)["train"] for each in (False, True)), strict=True
    ):
        one, other = pixels(seen), pixels(blank)
        assert (other == 255).all()
        assert (one != 255).any()
        assert one.shape == other.shape
        assert seen | {"images": None} == blank | {"images": None}
