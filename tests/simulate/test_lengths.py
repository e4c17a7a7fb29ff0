"""Lengths of responses: from a description, a list or saved samples; anything else is refused."""

import pandas as pd
import pytest

from rltrain.common.errors import ConfigError
from rltrain.run.seconds.lengths import read_lengths


@pytest.mark.parametrize(("mean", "most"), [(10_426, 27_648), (14_255, 27_648), (3, 8)])
def test_named_lengths_have_their_mean_and_longest(mean, most):
    prompts, answers = read_lengths(f"mean:{mean},max:{most},prompt:148").draw(128, 16)
    assert answers.shape == (128, 16)
    assert answers.mean() == pytest.approx(mean, rel=0.03)
    assert answers.max() == most
    assert set(prompts.tolist()) == {148}


def test_kept_answers_stay_with_their_prompt(tmp_path):
    (tmp_path / "samples").mkdir()
    rows = {"step": [1, 1, 1, 1], "row": [0, 0, 5, 5], "prompt_length": [7, 7, 9, 9], "response_length": [1, 2, 30, 40]}
    pd.DataFrame(rows).to_parquet(tmp_path / "samples" / "train_000001.parquet")
    prompts, answers = read_lengths(str(tmp_path)).draw(2, 2)
    assert {(int(p), *a) for p, a in zip(prompts, answers.tolist(), strict=True)} == {(7, 1, 2), (9, 30, 40)}


def test_a_run_cuts_what_is_longer():
    prompts, answers = read_lengths("mean:100,max:500,prompt:50").cut(20, 90).draw(8, 4)
    assert answers.max() == 90
    assert prompts.max() == 20


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("mean:abc,max:5", "'abc' is not a number"),
        ("mean:5", "max= is not given: the largest number of tokens"),
        ("mean:9,max:5", "mean: must be below max:"),
        ("mean:nan,max:5", "it must be finite"),
        ("10426", "is neither a distribution nor a folder"),
    ],
)
def test_lengths_of_no_form_are_refused_with_the_form(text, told):
    with pytest.raises(ConfigError, match=told):
        read_lengths(text)
