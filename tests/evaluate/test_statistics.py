"""Statistics of an evaluation, by hand and by simulation."""

from itertools import combinations

import numpy as np
import pytest

from rltrain.tools.evaluate.statistics import average, draws_of, figures, majority_of, mean_of, pass_of
from rltrain.trainer.validation import sizes

NAN = float("nan")


def test_k_is_a_power_of_two_up_to_n():
    assert [sizes(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_an_answer_without_a_score_counts_for_nothing():
    values = np.array([[1, 0, NAN, 1], [NAN] * 4, [0, 0, 0, 0]], dtype=float)
    assert mean_of(values) == pytest.approx([2 / 3, NAN, 0], nan_ok=True)
    # Three responses to the first prompt are left, one of them wrong, so of any two one is right.
    assert pass_of(values, 2) == pytest.approx([1, NAN, 0], nan_ok=True)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    values = np.array([[1, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0]], dtype=float)
    for k in (1, 2, 3, 4, 6):
        shares = [np.mean([max(subset) for subset in combinations(row, k)]) for row in values]
        assert pass_of(values, k) == pytest.approx(shares)


def test_the_majority_of_all_answers_is_exact_and_ties_are_shared():
    votes = np.array([["4", "4", "5", ""], ["7", "8", "7", "8"], ["1", "2", "3", "3"]], dtype=object)
    values = np.array([[0, 0, 1, 0], [1, 0, 1, 0], [0, 0, NAN, 1]], dtype=float)
    # For the last prompt, failed scores have no vote, so three texts have one vote each.
    assert majority_of(values, votes, [4])[4] == pytest.approx([0, 0.5, 1 / 3])


def test_the_average_gives_every_source_the_same_weight_and_takes_what_all_have():
    columns = {"a": {"avg": np.zeros(40), "maj": np.zeros(40)}, "b": {"avg": np.arange(10) % 2 * 1.0}}
    draws = [
        dict(zip(each, draws_of(np.stack(list(each.values()), 1), name).T, strict=True))
        for name, each in columns.items()
    ]
    found = average([figures(each, drawn) for each, drawn in zip(columns.values(), draws, strict=True)], draws)
    assert found.keys() == {"avg"}
    assert found["avg"].value == 0.25
    alone = figures(columns["b"], draws[1])["avg"]
    assert (found["avg"].low, found["avg"].high) == pytest.approx((alone.low / 2, alone.high / 2))


def test_intervals_hold_the_truth_in_about_95_of_100_evaluations():
    """Prompts of all difficulties with four responses each: accuracy, pass@2 and majority of another set of prompts."""
    random = np.random.default_rng(1)
    difficulty = random.beta(0.7, 0.9, size=200_000)
    truth = {"avg": difficulty.mean(), "pass": (1 - (1 - difficulty) ** 2).mean()}
    three_of_four = 4 * difficulty**3 * (1 - difficulty) + difficulty**4
    truth["maj"] = (three_of_four + 0.5 * 6 * (difficulty * (1 - difficulty)) ** 2).mean()
    hits = dict.fromkeys(truth, 0)
    for number in range(160):
        right = random.random((60, 4)) < random.beta(0.7, 0.9, size=60)[:, None]
        values = right.astype(float)
        columns = {"avg": mean_of(values), "pass": pass_of(values, 2)}
        columns["maj"] = majority_of(values, np.where(right, "right", "wrong"), [4])[4]
        drawn = draws_of(np.stack(list(columns.values()), 1), str(number), 400)
        for name, figure in figures(columns, dict(zip(columns, drawn.T, strict=True))).items():
            hits[name] += figure.low <= truth[name] <= figure.high
    assert all(0.9 < count / 160 < 0.99 for count in hits.values()), hits
