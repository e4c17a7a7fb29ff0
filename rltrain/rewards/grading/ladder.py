"""Whether an answer means the ground truth: text, choice letter, number, list or tuple, then algebra.

The steps go from cheap and exact to slow and lenient, and the first that can tell decides. Two things are ours because
math-verify has other rules: units that contradict each other (it drops them), and numbers (a whole number is never
rounded, others to a tolerance that the data set names, also within lists). Matrices, unions, plus-minus and formulas
are left to it.
"""

import re
from fractions import Fraction

from rltrain.rewards.grading.latex import normalise, split_unit, tidy
from rltrain.rewards.grading.symbolic import symbolically_equal

# Longer answers are no answers to these questions; the bound keeps every step below cheap.
MAX_CHARS = 512
_MAX_NUMBER_CHARS = 64
_MAX_PARTS = 32
_MAX_DEPTH = 3

_LETTER = re.compile(r"[A-J]")
_CHOICE = re.compile(
    r"(?:option|choice|answer|选项|选|答案)?\s?(?:\(([A-Ja-j])\)|([A-Ja-j])(?:[).:]|$))", re.IGNORECASE
)
_DECIMAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_FRACTION = re.compile(r"(-?)([0-9]*)\\frac\{(-?[0-9]+)\}\{([0-9]+)\}")
# Three figures of exponent at most, because the power is computed exactly.
_SCIENTIFIC = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(?:\\times10\^|\\cdot10\^|[eE])\{?([+-]?[0-9]{1,3})\}?")
_BRACKETS = (("(", ")"), ("(", "]"), ("[", ")"), ("[", "]"), ("\\{", "\\}"))


def equal(answer: str, truth: str, tolerance: Fraction = Fraction(0), symbolic: bool = True) -> bool:
    """Whether ``answer`` means ``truth``. ``tolerance`` is relative, for numbers whose truth is not whole."""
    return len(answer) <= MAX_CHARS and _equal(tidy(answer), tidy(truth[:MAX_CHARS]), tolerance, symbolic, 0)


def number(text: str) -> Fraction | None:
    """The value of a normalised number: decimal, fraction, mixed, scientific. None for anything else or longer."""
    if len(text) > _MAX_NUMBER_CHARS or not text.isascii():
        return None
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    fraction = _FRACTION.fullmatch(text)
    if fraction and int(fraction[4]):
        value = int(fraction[2] or 0) + Fraction(int(fraction[3]), int(fraction[4]))
        return -value if fraction[1] else value
    scientific = _SCIENTIFIC.fullmatch(text)
    return Fraction(scientific[1]) * Fraction(10) ** int(scientific[2]) if scientific else None


def _equal(answer: str, truth: str, tolerance: Fraction, symbolic: bool, depth: int) -> bool:
    (answer_value, answer_unit), (truth_value, truth_unit) = split_unit(answer), split_unit(truth)
    # Only where both are known: an answer without the unit, or with an odd one, may still be right.
    if answer_unit and truth_unit and answer_unit != truth_unit:
        return False
    ours, theirs = normalise(answer_value), normalise(truth_value)
    if not ours:
        return False
    if ours == theirs or _same_word(ours, theirs):
        return True
    letter = theirs.strip("(){}.")
    if _LETTER.fullmatch(letter):
        choice = _CHOICE.match(answer_value)
        return choice is not None and (choice[1] or choice[2]).upper() == letter
    value, right = number(ours), number(theirs)
    if value is not None and right is not None:
        return _close(value, right, "%" in answer, "%" in truth, tolerance)
    if depth < _MAX_DEPTH and _same_parts(ours, theirs, tolerance, symbolic, depth):
        return True
    if "," not in theirs and "=" in answer_value and "=" not in truth_value:  # "AB = 12" answers "12"
        return _equal(answer_value.rpartition("=")[2].strip(), truth, tolerance, symbolic, depth)
    return symbolic and symbolically_equal(answer_value, truth_value)


def _same_word(answer: str, truth: str) -> bool:
    """Whether these are one word in another case; ``AB`` and ``ab``, however, may be two things."""
    return answer.isalpha() and (len(answer) > 2 or answer.lower() == "no") and answer.casefold() == truth.casefold()


def _close(value: Fraction, right: Fraction, value_percent: bool, right_percent: bool, tolerance: Fraction) -> bool:
    """Whether numbers agree. A percentage on one side only counts as it stands, or divided by a hundred."""
    candidates = [(value, right)]
    if value_percent and not right_percent:
        candidates.append((value / 100, right))
    elif right_percent and not value_percent:
        candidates.append((value, right / 100))
    return any(a == b or (b.denominator > 1 and abs(a - b) <= tolerance * abs(b)) for a, b in candidates)


def _same_parts(answer: str, truth: str, tolerance: Fraction, symbolic: bool, depth: int) -> bool:
    """Whether tuples, intervals, lists or sets agree part by part; False for anything else."""
    (ours_in, ours), (theirs_in, theirs) = _parts(answer), _parts(truth)
    if ours_in != theirs_in or len(ours) != len(theirs) or not 1 < len(theirs) <= _MAX_PARTS:
        return False
    if theirs_in:
        pairs = zip(ours, theirs, strict=True)
        return all(_equal(our, their, tolerance, symbolic, depth + 1) for our, their in pairs)
    for their in theirs:
        found = next((our for our in ours if _equal(our, their, tolerance, symbolic, depth + 1)), None)
        if found is None:
            return False
        ours.remove(found)
    return True


def _parts(text: str) -> tuple[str, list[str]]:
    """The brackets around a normalised text ("" for a list or a set, which have no order), and its parts."""
    whole = _split(text)
    for opening, closing in _BRACKETS:
        if len(whole) == 1 and text.startswith(opening) and text.endswith(closing):
            return "" if opening == "\\{" else opening + closing, _split(text[len(opening) : -len(closing)])
    return "", whole


def _split(text: str) -> list[str]:
    """Cut at commas outside all brackets."""
    parts, start, depth = [], 0, 0
    for position, character in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth < 0:  # "1,2)\\cup(3,4": the outer brackets were two groups
            return [text]
        if depth == 0 and character == ",":
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]
