"""Answers written in LaTeX: where the answer stands, and one spelling for what is typeset differently.

A model may write anything, and a pattern that backtracks could cost the whole deadline. So every pattern here is
linear: one class of characters repeated, or a few bounded ones.
"""

import re

TAIL_CHARS = 4096
_MAX_BOX_CHARS = 512

# One spelling for characters: full-width forms, typographic signs, Chinese punctuation.
_CHARACTERS = {0xFF01 + i: chr(0x21 + i) for i in range(94)} | {
    ord(sign): plain
    for sign, plain in {
        "−": "-", "–": "-", "π": "\\pi ", "×": "\\times ", "·": "\\cdot ", "∞": "\\infty ", "°": "^\\circ ",
        "≤": "\\le ", "≥": "\\ge ", "∪": "\\cup ", "²": "^2", "³": "^3", "。": ".", "、": ",", "\n": " ", "~": " ",
        "\u00a0": " ",
    }.items()
}  # fmt: skip
_COMMANDS = (
    ("{bmatrix}", "{pmatrix}"),
    ("{matrix}", "{pmatrix}"),
    ("\\tfrac", "\\frac"),
    ("\\dfrac", "\\frac"),
    ("\\cfrac", "\\frac"),
    ("\\neq", "\\ne"),
    ("\\leq", "\\le"),
    ("\\geq", "\\ge"),
    ("{,}", ","),
    ("\\!", ""),
    ("\\left", ""),
    ("\\right", ""),
    ("\\displaystyle", ""),
    ("\\degree", "^\\circ"),
    ("\\quad", " "),
    ("\\$", ""),
    ("$", ""),
)
_SPACES = re.compile(r"(?<!\\)\\[,;: ]")
_AND = re.compile(r"\\text\{\s?(?:and|or)\s?\}|,?\s(?:and|or)\s|[和或]")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm)\s?\{([^{}]*)\}")
_DEGREES = ("^{\\circ}", "^\\circ")
_ONE_CHARACTER = re.compile(r"([\^_])\{(\w)\}")
# \frac12 and \frac1{2}. A nested brace is left alone: algebra reads it.
_ARGUMENTS = re.compile(r"\\frac\s?(?:\{([^{}]*)\}|(\w))\s?(?:\{([^{}]*)\}|(\w))")
_INNER_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")
_GROUPED = re.compile(r"-?[0-9]{1,3}(?: [0-9]{3})+")
_MIXED = re.compile(r"(-?[0-9]{1,12}) ([0-9]{1,12})/([0-9]{1,12})")
_PLUS = re.compile(r"(^|[(,\[])\+")

_UNIT_NAMES = {
    "mm": "millimeter millimetre 毫米", "cm": "centimeter centimetre 厘米", "m": "meter metre 米",
    "km": "kilometer kilometre 千米 公里", "in": "inch inches", "ft": "foot feet", "g": "gram 克",
    "kg": "kilogram 千克 公斤", "s": "second sec 秒", "min": "minute 分钟", "h": "hour hr 小时",
    "L": "liter litre 升", "mL": "ml milliliter 毫升",
    "N": "newton", "J": "joule", "W": "watt", "V": "volt", "A": "ampere", "Pa": "pascal", "Hz": "hertz",
}  # fmt: skip
_UNITS = {alias + s: unit for unit, names in _UNIT_NAMES.items() for alias in (unit, *names.split()) for s in ("", "s")}
# Words after a number that are no unit, and Chinese signs that change the number.
_NO_UNIT = frozenset(("or", "and", "to", "sqrt", "pi", "sin", "cos", "tan", "log", "mod", "factorial", "squared")) | {
    *("dozen", "hundred", "thousand", "million", "billion")
}
_COUNTS = frozenset("十百千万亿分又和或到倍")
_VALUE = re.compile(r"-?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\\frac\{[0-9]{1,9}\}\{[0-9]{1,9}\})(?:\s?\\pi)?")
_BARE_UNIT = re.compile(r"(\s?)([A-Za-z][A-Za-z ]*|[一-鿿]{1,6})((?:/[A-Za-z]+)?(?:\^\{?[0-9]\}?)?)\s?\.?")
_TEXT_UNIT = re.compile(r"\\(?:text|textrm|mathrm|mbox|rm)\s?\{([^{}]*)\}\s?((?:\^\{?[0-9]\}?)?)\s?\.?")


def last_boxed(solution: str) -> str | None:
    """The content of the last ``\\boxed{}`` or ``\\fbox{}``, braces counted; None if it never closes or is too long."""
    start = max(solution.rfind("\\boxed"), solution.rfind("\\fbox"))
    if start < 0:
        return None
    # Either command has one x: \boxed goes on with "ed" after it, \fbox ends there.
    opening = solution.find("x", start + 3) + (len("ed") if solution[start + 1] == "b" else 0) + 1
    # Bounded, so that a box that never closes costs a bounded search.
    content = solution[opening : opening + _MAX_BOX_CHARS + 2]
    if content.startswith(" ") and not content.lstrip().startswith("{"):  # "\boxed 5$": up to the end of the formula
        return re.split(r"[$\n]", content)[0].strip() or None
    content = content.lstrip()
    depth = 0
    for position, character in enumerate(content):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return content[1:position] if position else None
    return None


def tidy(text: str) -> str:
    """The same formula with one spelling for signs, spaces, fractions and enumerations. Still valid LaTeX."""
    text = text.translate(_CHARACTERS)
    for old, new in _COMMANDS:
        text = text.replace(old, new)
    text = " ".join(_SPACES.sub(" ", text).split())
    return _AND.sub(",", text).removesuffix(".").strip()


def split_unit(text: str) -> tuple[str, str | None]:
    """A tidy text without the unit behind its value, and that unit where it is a known one, with its power."""
    start = text.rfind("\\")
    wrapped = _TEXT_UNIT.fullmatch(text, start) if start > 0 else None
    if wrapped and (text[:start].rstrip()[-1:].isdigit() or text[:start].rstrip().endswith((")", "}", "\\pi"))):
        return text[:start].rstrip(), _known(wrapped[1], wrapped[2])
    text = _WRAPPER.sub(r"\1", text).strip()
    value = _VALUE.match(text)
    bare = _BARE_UNIT.fullmatch(text, value.end()) if value else None
    if value is None or bare is None or not _may_be_unit(bare[2].strip(), bool(bare[1])):
        return text, None
    return value[0], _known(bare[2], bare[3])


def normalise(text: str) -> str:
    """One spelling for answers that differ in spaces, units, ``\\frac12``, ``1/2``, ``.5`` and other typesetting."""
    text, _ = split_unit(tidy(text))
    for removed in (*_DEGREES, "\\%", "%"):
        text = text.replace(removed, "")
    text = text.strip().rstrip(".")
    name, equals, value = text.partition("=" if "=" in text else "\\in ")
    if equals and len(name.strip()) <= 2 and "=" not in value:  # "x = 5" answers "5"
        text = value.strip()
    mixed = _MIXED.fullmatch(text)
    if mixed:
        return f"{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    if _GROUPED.fullmatch(text):
        text = text.replace(" ", "")
    text = _ARGUMENTS.sub(r"\\frac{\1\2}{\3\4}", text)
    text = _ONE_CHARACTER.sub(r"\1\2", _INNER_SPACE.sub("", text))
    return _number(_PLUS.sub(r"\1", text))


def _known(name: str, power: str) -> str | None:
    unit = _UNITS.get(name.strip())
    return None if unit is None else unit + power.replace("{", "").replace("}", "")


def _may_be_unit(name: str, spaced: bool) -> bool:
    if not name.isascii():
        return not _COUNTS & set(name) or name in _UNITS
    if name in _UNITS:
        return spaced or len(name) > 1  # "5m" may be five times m
    words = name.lower().split()
    return spaced and all(len(word) > 2 for word in words) and not _NO_UNIT & set(words)


def _number(text: str) -> str:
    """One spelling for numbers: 1000 for 1,000, 0.5 for .5 and 0.50, ``\\frac{1}{2}`` for 1/2."""
    upper, slash, lower = text.partition("/")
    sign = "-" if upper.startswith("-") else ""
    if slash and upper.removeprefix("-").isdigit() and lower.isdigit():
        return f"{sign}\\frac{{{upper.removeprefix('-')}}}{{{lower}}}"
    digits = text.removeprefix("-")
    groups = digits.split(".")[0].split(",")
    if len(groups) > 1 and 1 <= len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:]):
        digits = digits.replace(",", "")
    whole, _, fraction = digits.partition(".")
    if not (whole + fraction).isdigit():
        return text
    fraction = fraction.rstrip("0")
    return ("-" if text.startswith("-") else "") + (whole.lstrip("0") or "0") + ("." + fraction if fraction else "")
