"""What needs the extra ``math``."""

import pytest

from rltrain.rewards.processes.slot import Slot
from rltrain.rewards.registry import find_scorer
from tests.rewards.test_labelled import rows, verdict

pytest.importorskip("math_verify", reason="needs the extra: pip install 'rltrain[math]'")


@pytest.mark.parametrize("row", rows("symbolic"), ids=lambda row: row["answer"])
def test_algebra_decides_where_text_and_numbers_cannot(row):
    score = find_scorer(row["source"])(row["answer"], row["truth"], {})
    assert (verdict(row, score).get("correct", score) or 0) == row["correct"]


BOMBS = [
    "9^{9^{9^{9}}}",
    "9^9^9^9",
    "(((((((9!)!)!)!)!)!)!)!",
    "\\frac{1}{" * 40 + "2" + "}" * 40,
    "10^{10^{10}}",
    "\\int\\int\\int e^{x^2} dx dy dz",
    "\\sum_{n=1}^{100000000} n^{n}",
    "2^{99999999}",
    "99999999!",
    "+".join(["\\sqrt{2}"] * 60),
    "(x+1)^{999}(y+2)^{999}(z+3)^{999}",
]


@pytest.fixture(scope="module")
def slot():
    with Slot(timeout_s=2.0) as made:
        yield made


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_a_bomb_costs_its_own_answer_at_most(slot, bomb):
    score = slot.score("lighteval/MATH", f"\\boxed{{{bomb}}}", "x+1", {})
    assert (score.value, score.status) in ((0.0, "ok"), (None, "timeout"), (None, "crashed"))
    assert slot.score("lighteval/MATH", "\\boxed{1+x}", "x+1", {}).value == 1.0


def test_words_are_not_taken_for_products_of_letters():
    assert find_scorer("lighteval/MATH")("\\boxed{silent}", "\\text{listen}", {}) == 0.0


def test_scorers_of_ours_print_nothing():
    with Slot() as made:
        assert made.score("lighteval/MATH", "\\boxed{x+1}", "1+x", {}).value == 1.0
        assert made.take_printed() == ""
