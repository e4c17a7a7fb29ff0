"""Formulas are compared by their values, and no large number is computed."""

import pytest

from rltrain.rewards.grading import formula
from rltrain.rewards.grading.truths import solutions, why_unmatchable
from rltrain.rewards.processes.slot import ScoringSlot
from tests.clock import PATIENCE_S

EQUAL = [
    ("x+1", "1+x"),
    ("\\frac{n!}{(n-1)!}", "n"),
    ("(-1)^n", "\\cos(n\\pi)"),
    ("\\frac{1}{x-1}-\\frac{1}{x+1}", "\\frac{2}{x^2-1}"),
    ("\\sin^{-1}\\frac12", "\\frac{\\pi}{6}"),
    ("e^{i\\pi}", "-1"),
    ("\\sqrt[3]{-8}", "-2"),
    ("\\log 100", "2"),
    ("\\log x", "\\ln x"),
    ("|x-y|", "|y-x|"),
    ("\\lfloor 3.7\\rfloor", "3"),
    ("\\sin 2x", "2\\sin x\\cos x"),
    ("\\frac{\\log 8}{\\log 2}", "3"),
]
DIFFERENT = [
    ("\\sqrt{x^2}", "x"),
    ("|x|", "x"),
    ("xy|x|", "x^2y"),
    ("\\sqrt{-9}", "-3i"),
    ("\\frac{\\sqrt2}{2^{90}}", "\\frac{\\sqrt2}{2^{91}}"),
    ("1.41421356237309504880", "\\sqrt2"),
    ("\\sin(\\pi x)", "0"),
    ("(-1)^n", "1"),
    ("x", "y"),
    ("x'", "x"),
    ("\\tan 90^\\circ", "\\tan 270^\\circ"),
    ("\\frac10", "\\frac10"),
    ("\\ln x", "\\log_{10} x"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_formulas_with_one_value_are_equal(one, other):
    assert formula.same_formula(one, other)
    assert formula.same_formula(other, one)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_formulas_that_differ_anywhere_are_not(one, other):
    assert not formula.same_formula(one, other)
    assert not formula.same_formula(other, one)


def test_equations_are_equal_but_for_a_factor():
    assert formula.same_equation("y=2x+3", "2x-y=-3")
    assert not formula.same_equation("y=2x+3", "2x+y=-3")
    assert not formula.same_equation("x=2", "y=2")


BOMBS = [
    "9^{9^{9^{9}}}",
    "(((((((9!)!)!)!)!)!)!)!",
    "\\frac{1}{" * 40 + "2" + "}" * 40,
    "\\int\\int\\int e^{x^2} dx dy dz",
    "\\sum_{n=1}^{100000000} n^{n}",
    "2^{99999999}",
    "+".join(["\\sqrt{2}"] * 50),
    "(x+1)^{999}(y+2)^{999}(z+3)^{999}",
    "(x+y)^{3000}" * 35,
    "2^{30000}" * 50,
    "x^{\\pi}" * 60,
    "e^{" * 20 + "x" + "}" * 20,
    "\\sin(" * 20 + "x" + ")" * 20,
    "\\sin(10^{59})" * 30,
    "x!" * 200,
    "0." + "9" * 490,
    "x^{x^{x^{x}}}",
    "|" * 500,
    "\\{" * 100 + "1" + "\\}" * 100,
    "10^{-" + "9" * 200 + "}",
]


def test_a_bomb_leaves_its_scorer_alive():
    """A formula that explodes is unequal. No large number is computed, or the test would time out."""
    with ScoringSlot(timeout_s=PATIENCE_S) as slot:
        for bomb in BOMBS:
            for truth in ("x+1", "\\sqrt{2}", "(1,2)", bomb + "+1"):
                score = slot.score("lighteval/MATH", f"\\boxed{{{bomb}}}", truth, {})
                assert (score.status, score.value) == ("ok", 0.0), (bomb, truth)
        assert slot.score("lighteval/MATH", "\\boxed{1+x}", "x+1", {}).value == 1.0
        assert slot.take_printed() == ""


@pytest.mark.parametrize(
    ("truth", "texts"),
    [
        ("5", ["5"]),
        (5, ["5"]),
        (5.0, ["5"]),
        (1e16, ["10000000000000000"]),
        ('["5", "6"]', ["5", "6"]),
        (["5", 6.0], ["5", "6"]),
        ("\\boxed{5}", ["5"]),
        ('["5', ['["5']),
    ],
)
def test_truths_are_read_as_files_have_them(truth, texts):
    assert solutions(truth) == texts


@pytest.mark.parametrize(
    "truth", ["{'value': '5', 'unit': 'cm'}", '{"value": 5}', {"value": 5}, "", None, float("nan"), [], " ", "1" * 600]
)
def test_unmatchable_ground_truths_are_reported(truth):
    assert why_unmatchable(truth)


@pytest.mark.parametrize("truth", ["5", ["5"], '["5"]', "{5}", "\\{1,2\\}", 5.0, "None of these", ""[:0] + "0"])
def test_truths_that_an_answer_can_match_are_not(truth):
    assert why_unmatchable(truth) is None
