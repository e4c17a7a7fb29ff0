"""Comparison of an answer with the ground truth: text, choice letter, number, parts, equations, then formulas.

The steps go from cheap and exact to lenient; the first conclusive step decides. A false positive is worse than a false
negative, because the model learns to exploit it. So names of unknowns, units, bases and words after a number are
compared if both sides have them, and numbers are compared exactly unless the data set sets a tolerance.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from rltrain.rewards.grading import formula
from rltrain.rewards.grading.intervals import intervals_of
from rltrain.rewards.grading.latex import normalise, tidy
from rltrain.rewards.grading.numbers import Value, near, same_number
from rltrain.rewards.grading.units import contradict, quantity

# Longer texts are not answers to these questions. The limit also bounds the time of all steps.
MAX_CHARS = 512
_MAX_NUMBER_CHARS = 64
_MAX_PARTS = 32
_MAX_DEPTH = 4

_LETTER = re.compile(r"[A-J]")
# Sets of numbers, written as a command or in a font that replaces blackboard bold.
_R = re.compile(r"\\([NZQR])(?![A-Za-z])")
_SET = re.compile(r"\\(?:mathbf|mathrm|boldsymbol|bm|bf|text)\s?\{\s?([NZQRC])\s?\}")
_CHOICE = re.compile(
    r"(?:option|choice|answer|选项|选|答案)?\s?(?:\(([A-Ja-j])\)|([A-Ja-j])(?:[).:]|$))", re.IGNORECASE
)
_DECIMAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_FRACTION = re.compile(r"(-?)([0-9]*)\\frac\{(-?[0-9]+)\}\{([0-9]+)\}")
# Exponents have at most three digits, because the power is computed exactly.
_SCIENTIFIC = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(?:\\times10\^|\\cdot10\^|[eE])\{?([+-]?[0-9]{1,3})\}?")
_THOUSANDS = re.compile(r"(?<![0-9,.])([0-9]{1,3}(?:,[0-9]{3})+)(?!,?[0-9])")
_BASE = re.compile(r"\(?(-?[0-9][0-9A-Fa-f.]*)\)?_\{?\(?([0-9]{1,2}|[a-z]+)\)?\}?")
_BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}
_BRACKETS = (("(", ")"), ("(", "]"), ("[", ")"), ("[", "]"), ("\\{", "\\}"))
_NAME = r"(?:\\[A-Za-z]+|[A-Za-z])(?:_(?:\w|\{\w{1,8}\}))?'*"
_UNKNOWN = re.compile(_NAME)
_FUNCTION = re.compile(r"(?:[fghpqFGHPESVATN]|\\phi|\\psi)(?:_(?:\w|\{\w{1,8}\}))?'*(?:\^\{-1\})?\(.*\)|\|[A-Z]\|")
_REACHED = re.compile(r"[-+*/^]\s?[0-9]|[0-9]\s?[-+*/]|[0-9]\s?[a-z](?![A-Za-z])")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)\s?\(?(?:[A-Z]|\\[a-z]+)\)?")
_ROWS = re.compile(r"\\begin\{(pmatrix|cases)\}(.*)\\end\{\1\}")


def equal(answer: str, truth: str, tolerance: Fraction = Fraction(0), symbolic: bool = True) -> bool:
    """Return True if ``answer`` means ``truth``. ``tolerance`` is relative, for truths that are not integers."""
    if len(answer) > MAX_CHARS:
        return False
    ours, theirs = (tidy(_R.sub(r"\\mathbb{\1}", text)) for text in (answer, truth[:MAX_CHARS]))
    if "\\mathbb" in ours + theirs:  # in other texts a bold letter means the letter
        fonts = [_SET.sub(r"\\mathbb{\1}", text) for text in (answer, truth[:MAX_CHARS])]
        ours, theirs = (tidy(_R.sub(r"\\mathbb{\1}", text)) for text in fonts)
    grouped = [ungrouped(text) for text in (ours, theirs)]
    if _equal(grouped[0], grouped[1], tolerance, symbolic, 0):
        return True
    return grouped != [ours, theirs] and _equal(ours, theirs, tolerance, symbolic, 0)


def number(text: str) -> Fraction | None:
    """Return the value of a normalised number: decimal, fraction, mixed, scientific. None for other or longer texts."""
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


def ungrouped(text: str) -> str:
    """Return a tidy text with 1000 for 1,000; a tuple, an interval or a set keeps its commas."""
    return text if text[:1] in ("(", "[", "\\") else _THOUSANDS.sub(lambda digits: digits[1].replace(",", ""), text)


def _equal(answer: str, truth: str, tolerance: Fraction, symbolic: bool, depth: int) -> bool:
    ours, theirs = quantity(answer), quantity(truth)
    if depth > _MAX_DEPTH or contradict(ours, theirs):
        return False
    plain, right = normalise(ours.value), normalise(theirs.value)
    if not plain:
        return False
    if plain == right or _same_word(plain, right):
        return True
    if ours.marks and ":" in plain:  # a time is not a ratio
        return False
    letter = right.strip("(){}.")
    if _LETTER.fullmatch(letter):
        choice = _CHOICE.match(ours.value)
        if choice is not None or "=" not in plain:
            return choice is not None and (choice[1] or choice[2]).upper() == letter
    is_same = _same_numbers(ours.value, theirs.value, plain, right, tolerance, symbolic)
    if is_same is not None:
        return is_same

    def same(one: str, other: str) -> bool:
        return _equal(one, other, tolerance, symbolic, depth + 1)

    for check in (_same_equations, _same_intervals, _same_rows, _same_parts):
        is_same = check(ours.value, theirs.value, same)
        if is_same is not None:
            return is_same
    return symbolic and formula.same_formula(ours.value, theirs.value)


def _same_word(answer: str, truth: str) -> bool:
    """Return True for the same word in different case; but ``AB`` and ``ab`` may be different things."""
    return answer.isalpha() and (len(answer) > 2 or answer.lower() == "no") and answer.casefold() == truth.casefold()


def _same_numbers(answer: str, truth: str, plain: str, right: str, tolerance: Fraction, symbolic: bool) -> bool | None:
    """Return True if the numbers agree; None if either side is not a number."""
    bases = [_BASE.fullmatch(text) for text in (plain, right)]
    if any(bases):
        if all(bases) and len({_BASES.get(base[2], base[2]) for base in bases if base}) > 1:
            return False
        return len({base[1].upper() if base else text for base, text in zip(bases, (plain, right), strict=True)}) == 1
    literal = number(plain), number(right)
    if not symbolic and None in literal:
        return None
    values = [
        formula.value(_no_percent(text)) if exact is None else exact
        for exact, text in zip(literal, (answer, truth), strict=True)
    ]
    # "60^\circ" may be 60 or a third of pi. Both are tried, unless both values are literally numbers.
    if values[0] is None or values[1] is None:
        return None
    is_same = _close(values[0], values[1], "%" in answer, "%" in truth, tolerance)
    if not is_same and symbolic and "\\circ" in answer + truth:
        return formula.same_formula(answer, truth)
    return is_same


def _no_percent(text: str) -> str:
    return text.replace("\\%", "").replace("%", "")


def _close(value: Value, right: Value, value_percent: bool, right_percent: bool, tolerance: Fraction) -> bool:
    """Return True if the numbers agree. A percentage on only one side may also be divided by a hundred."""
    candidates = [(value, right)]
    if value_percent and not right_percent:
        candidates.append((value / 100, right))
    elif right_percent and not value_percent:
        candidates.append((value, right / 100))
    return any(same_number(a, b) or near(a, b, tolerance) for a, b in candidates)


Same = Callable[[str, str], bool]


def _same_equations(answer: str, truth: str, same: Same) -> bool | None:
    """Return True if equations agree, or an answer agrees with the value that an equation assigns to a name.

    "AB = 12" and "12" agree; "2x = 10" and "10" do not.
    """
    ours, theirs = (_sides(text) for text in (answer, truth))
    if ours is None and theirs is None:
        return None
    if ours is None:
        if theirs and "=" in answer and (assigned := _assigned(theirs)):
            return same(answer, assigned)
        # An answer may omit only a name: "2x+3" matches "y=2x+3".
        return _names_a_value(theirs[0], theirs[-1]) and same(answer, theirs[-1]) if theirs else None
    if theirs is None:
        if "=" in truth and (assigned := _assigned(ours)):
            return same(assigned, truth)
        if len(ours) == 2 and _UNKNOWN.fullmatch(ours[1]) and same(ours[0], truth):  # "5 = x"
            return True
        return all(_names_a_value(left, ours[-1]) for left in ours[:-1]) and same(ours[-1], truth)
    if _same_name(ours[0], theirs[0]) and same(ours[-1], theirs[-1]):
        return True
    return formula.same_equation(answer, truth)


def _sides(text: str) -> list[str] | None:
    """Return the sides of one equation, whose unknowns may be a tuple; None for a list of equations and other texts."""
    if len(_split(text)) > 1 or text.startswith(("\\begin", "\\{")):
        return None
    sides = [side.strip() for side in re.split(r"=|\\in(?![a-z])", text)]
    return sides if len(sides) > 1 else None


def _assigned(sides: list[str]) -> str | None:
    """Return ``(x,y)=(1,2)`` as the list ``x=1,y=2``; None for anything else."""
    (_, names), (_, values) = _parts(sides[0]), _parts(sides[-1])
    if not 1 < len(names) == len(values) or not all(map(_UNKNOWN.fullmatch, names)):
        return None
    return ",".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def _is_name(text: str) -> bool:
    return _UNKNOWN.fullmatch(text) is not None or _FUNCTION.fullmatch(text) is not None or formula.names(text) is None


def _names_a_value(left: str, value: str) -> bool:
    """Return True if the left side names the requested value: a name, a word, or a sum of several unknowns."""
    if _UNKNOWN.fullmatch(left) or _FUNCTION.fullmatch(left) or _ANGLE.fullmatch(left):
        return True
    letters = formula.names(left)
    if letters is None:  # words, angles or segments; or a tuple of names
        return not left[:1].isdigit() and not left.startswith("-") and not _REACHED.search(left)
    return len(letters) > 1 or (not letters and formula.same_formula(left, value))


def _same_name(one: str, other: str) -> bool:
    """Return True if two left sides may be the same: y and f(x), AB and x, but not x and y."""
    one, other = one.replace(" ", ""), other.replace(" ", "")
    if _UNKNOWN.fullmatch(one) and _UNKNOWN.fullmatch(other):
        return normalise(one) == normalise(other)
    functions = [_FUNCTION.fullmatch(name) is not None for name in (one, other)]
    if all(functions):
        return normalise(one) == normalise(other)
    if any(functions):
        return "y" in (one, other)
    return _is_name(one) and _is_name(other)


def _same_intervals(answer: str, truth: str, same: Same) -> bool | None:
    """Return True if two sets of real numbers agree; at least one must be an inequality or a union."""
    ours, theirs = intervals_of(answer), intervals_of(truth)
    if ours is None or theirs is None:
        return None
    intervals = answer.startswith(("(", "[", "\\{")) and truth.startswith(("(", "[", "\\{"))
    if intervals and not (ours[0] or theirs[0]) and max(len(ours[1]), len(theirs[1])) == 1:
        return None
    if None not in (ours[0], theirs[0]) and ours[0] != theirs[0]:
        return False
    return _matched(list(ours[1]), theirs[1], same)


def _same_rows(answer: str, truth: str, same: Same) -> bool | None:
    """Return True if matrices agree cell by cell, or the cases of a function in any order."""
    ours, theirs = _ROWS.fullmatch(answer), _ROWS.fullmatch(truth)
    if ours is None or theirs is None:
        return None
    if ours[1] != theirs[1]:
        return False
    rows, right = ([_cells(row) for row in _row_texts(text)] for text in (ours[2], theirs[2]))
    if len(rows) != len(right) or len(right) > _MAX_PARTS:
        return False

    def same_row(one: list[str], other: list[str]) -> bool:
        return len(one) == len(other) and all(map(same, one, other))

    if ours[1] == "pmatrix":
        return all(map(same_row, rows, right))
    return all(any(same_row(row, other) for row in rows) for other in right)


def _row_texts(text: str) -> list[str]:
    return [row for row in text.split("\\\\") if row.strip()]


def _cells(row: str) -> list[str]:
    return [re.sub(r"^(?:\\text\{)?(?:if|for|when)\b[ }]*", "", cell.strip(" ,")).strip() for cell in row.split("&")]


def _same_parts(answer: str, truth: str, same: Same) -> bool | None:
    """Return True if tuples, intervals, lists or sets agree part by part; None if neither has parts."""
    (ours_in, ours), (theirs_in, theirs) = _parts(answer), _parts(truth)
    if max(len(ours), len(theirs)) == 1 and not (
        ours_in == theirs_in == "" and (answer, truth) != (ours[0], theirs[0])
    ):
        return None
    if len(ours) != len(theirs) or len(theirs) > _MAX_PARTS:
        return False
    if ours_in != theirs_in and (ours_in, theirs_in) != ("", "()"):
        return False
    if ours_in != theirs_in or (not theirs_in and bool(_in_order(ours)) != bool(_in_order(theirs))):
        # If only one side names its unknowns, they are read in alphabetical order: x=1, y=2 is the point (1,2).
        ordered = [_in_order(parts) or parts for parts in (ours, theirs)]
        return (ours_in == theirs_in or bool(_in_order(ours))) and all(map(same, *ordered))
    return all(map(same, ours, theirs)) if theirs_in else _matched(ours, theirs, same)


def _in_order(parts: list[str]) -> list[str]:
    """Return parts that name different unknowns, in alphabetical order; [] for all others."""
    names = [part.partition("=")[0].strip() for part in parts if "=" in part]
    if not len(names) == len(parts) == len(set(names)) > 1:
        return []
    return sorted(parts) if all(len(name) == 1 for name in names) else parts


def _matched(ours: list[str], theirs: list[str], same: Same) -> bool:
    """Return True if every part has a separate partner, in any order."""
    if len(ours) != len(theirs) or len(theirs) > _MAX_PARTS:
        return False
    left = list(ours)
    for their in theirs:
        partner = next((our for our in left if same(our, their)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _parts(text: str) -> tuple[str, list[str]]:
    """Return the brackets around a text ("" for a list or a set, which have no order), and its parts."""
    whole = _split(text)
    for opening, closing in _BRACKETS:
        if len(whole) == 1 and text.startswith(opening) and text.endswith(closing):
            inner = _split(text[len(opening) : -len(closing)])
            if opening == "\\{" and inner != ["\\emptyset"]:
                return "", [signed for part in inner for signed in _both_signs(part)]
            return (opening + closing, inner) if len(inner) > 1 else ("", whole)
    return "", [signed for part in whole for signed in _both_signs(part)]


def _both_signs(text: str) -> list[str]:
    """Return the two values of a text with one plus-minus."""
    if text.count("\\pm") + text.count("\\mp") != 1:
        return [text]
    sign = "\\pm" if "\\pm" in text else "\\mp"
    before, _, after = text.partition(sign)
    plus = "+" if before.strip() and before.strip()[-1:] not in ("=", "(", "{", "[") else ""
    return [f"{before}{plus}{after}", f"{before}-{after}"]


def _split(text: str) -> list[str]:
    """Split at commas outside all brackets."""
    parts, start, depth = [], 0, 0
    for position, character in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth < 0:  # "1,2)\\cup(3,4": the outer brackets belong to two groups
            return [text]
        if depth == 0 and character == ",":
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]
