"""Words after a number: units, which may be missing, and words that change the meaning.

"5 cm" matches "5". "5 million" is a different number, "5 PM" and "5 AM" are different times, "5 or more" is not a
number.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from rltrain.rewards.grading.latex import undressed

_NAMES = {
    "mm": "millimeter millimetre 毫米", "cm": "centimeter centimetre 厘米", "m": "meter metre 米",
    "km": "kilometer kilometre 千米 公里", "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "g": "gram gramme 克", "kg": "kilogram kilo 千克 公斤", "mg": "milligram 毫克", "lb": "pound", "oz": "ounce",
    "s": "second sec 秒", "min": "minute 分钟", "h": "hour hr 小时", "day": "天", "year": "yr 年",
    "L": "l liter litre 升",
    "mL": "ml milliliter millilitre 毫升", "N": "newton", "J": "joule", "W": "watt", "V": "volt", "A": "ampere amp",
    "Pa": "pascal", "Hz": "hertz", "°": "degree deg 度", "dollar": "buck usd", "cent": "", "yuan": "元 rmb",
    "": "unit", "person": "people 人", "rad": "radian",
}  # fmt: skip
_UNITS = {
    alias + s: unit for unit, names in _NAMES.items() for alias in (unit, *names.split()) if alias for s in ("", "s")
}
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cu": "^3", "cubed": "^3"}
_FACTORS = {
    "hundred": Fraction(100), "thousand": Fraction(1000), "million": Fraction(10**6), "billion": Fraction(10**9),
    "trillion": Fraction(10**12), "lakh": Fraction(10**5), "crore": Fraction(10**7),
    "dozen": Fraction(12), "tenth": Fraction(1, 10), "hundredth": Fraction(1, 100),
    "thousandth": Fraction(1, 1000), "half": Fraction(1, 2), "halves": Fraction(1, 2), "third": Fraction(1, 3),
    "fifth": Fraction(1, 5),
}  # fmt: skip
_FACTORS |= {f"{word}s": factor for word, factor in _FACTORS.items()}
_SIGNS = {"百": Fraction(100), "千": Fraction(1000), "万": Fraction(10**4), "亿": Fraction(10**8)}
# Words that distinguish answers: if the truth has one, the answer must have it.
_DISTINGUISHING = (
    "am pm noon midnight north south east west northeast northwest southeast southwest bc ad bce ce left right up "
    "down upward downward upwards downwards clockwise counterclockwise anticlockwise profit loss gain increase "
    "decrease rise fall older younger forward backward"
)
_MARKS = frozenset(_DISTINGUISHING.split())
# Words that are not units: the text before them is not the whole answer.
_OTHER_WORDS = (
    "or and to sqrt pi sin cos tan log ln exp mod modulo factorial plus minus over under by divided multiplied not no "
    "never isn't is are was be the a an of at than as more less fewer greater larger smaller least most approximately "
    "approx about around almost nearly roughly answer answers wrong false incorrect correct maybe perhaps possibly "
    "remainder rem base squared cubed root power if when where for but except only infinity quarter quarters fourth "
    "fourths sixth sixths seventh eighth ninth score gross recurring repeating doubled tripled halved inverse prime "
    "too so very much many few higher lower bigger double triple twice other others different this that it they there "
    "between through until does doesn't can cannot can't yes one two three four five six seven eight ten nine above "
    "below ahead behind later earlier early late ago before after inside outside even odd real imaginary negative "
    "positive so because since however then hence thus wait actually instead minimum maximum max min ish any all none"
)
_NO_UNIT = frozenset(_OTHER_WORDS.split())
_NO_UNIT_SIGNS = frozenset("十分又和或到倍不非以左余多几上下约")
_MAX_WORDS = 3

_VALUE = re.compile(r"-?(?:[0-9][0-9,]*(?:\.[0-9]+)?(?::[0-9]{2})?|\\frac\{[0-9]{1,9}\}\{[0-9]{1,9}\})(?:\s?\\pi)?")
_BARE = re.compile(r"(\s?)([A-Za-z][A-Za-z. ]*|[一-鿿]{1,6})((?:/[A-Za-z]+)?(?:\^\{?[0-9]\}?)?)\s?\.?")
_WRAPPED = re.compile(r"\\text\{([^{}]*)\}\s?((?:\^\{?-?[0-9]\}?)?)\s?([/.]?)\s?")
_TEMPERATURE = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)\s?\^\\circ\s?(?:\\text\{\s?)?([CF])\s?\}?")
_ENDS = (")", "}", "\\pi", "^\\circ", "%")


class Quantity(NamedTuple):
    """A value as tidy text, its unit, the words of an unknown unit, and the words that distinguish answers."""

    value: str
    unit: str | None = None
    words: frozenset[str] = frozenset()
    marks: frozenset[str] = frozenset()


def quantity(text: str) -> Quantity:
    """Parse a tidy text into value, unit and marks. Words that are neither unit nor mark stay in the value."""
    temperature = _TEMPERATURE.fullmatch(text)
    if temperature:
        return Quantity(temperature[1], f"°{temperature[2]}")
    value, words, spaced = _split_words(text)
    understood = _understood(value, words, spaced) if words else None
    return understood or Quantity(undressed(text, words=" {} ").strip())


def contradict(answer: Quantity, truth: Quantity) -> bool:
    """Return True if unit or marks of two values differ. An answer may omit a unit, but not a distinguishing word."""
    if truth.marks - answer.marks or (truth.marks and answer.marks != truth.marks):
        return True
    if not answer.unit or not truth.unit or answer.unit == truth.unit:
        return False
    # One side may have additional words: "12 cubes" and "12 red cubes" may be the same.
    return not (answer.words and truth.words and (answer.words <= truth.words or truth.words <= answer.words))


def _split_words(text: str) -> tuple[str, str, bool]:
    """Return the value, the words after it, and True if a space separates them."""
    value, words = text, ""
    while (start := value.rfind("\\text{")) > 0 and (match := _WRAPPED.fullmatch(value, start)):
        value, words = value[:start].rstrip(), f"{match[1].strip()}{match[2]}{match[3]} {words}"
    if words and (value[-1:].isdigit() or value.endswith(_ENDS)):
        bare = _bare(value)
        return (bare[0], f"{bare[1]} {words}", True) if bare else (value, words, True)
    bare = _bare(undressed(text, words=" {}").strip())
    return bare or (text, "", False)


def _bare(text: str) -> tuple[str, str, bool] | None:
    value = _VALUE.match(text)
    words = _BARE.fullmatch(text, value.end()) if value else None
    return (value[0], words[2] + words[3], bool(words[1])) if value and words else None


def _understood(value: str, text: str, spaced: bool) -> Quantity | None:
    factor, text = _chinese_factor(text)
    words = text.replace("{", "").replace("}", "").replace("/", " per ").split()
    words = [word.strip(".,;()") for word in words]
    joined = " ".join(words)
    for spelled, word in (("a.m", "am"), ("p.m", "pm"), ("b.c", "bc"), ("a.d", "ad"), ("per cent", "percent")):
        joined = joined.lower().replace(spelled, word) if spelled in joined.lower() else joined
    words = joined.split()
    while words and words[0].lower() in _FACTORS:
        factor *= _FACTORS[words.pop(0).lower()]
    percent = "\\%" if words[:1] == ["percent"] else ""
    words = words[len(percent[:1]) :]
    marks = frozenset(word.lower() for word in words if word.lower() in _MARKS)
    rest = [word for word in words if word.lower() not in _MARKS]
    if factor == 1 and not percent and rest and not marks and not _may_be_unit(rest, spaced):
        return None
    if any(_is_no_unit(word) for word in rest) or len(rest) > _MAX_WORDS:
        return None
    if factor != 1:
        plain = re.sub(r"\\frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2", value.replace(",", ""))
        if not re.fullmatch(r"-?[0-9]+(\.[0-9]+|/[0-9]*[1-9])?", plain):
            return None
        number = Fraction(plain) * factor
        value = f"\\frac{{{number.numerator}}}{{{number.denominator}}}" if number.denominator > 1 else str(number)
    unit, unknown = _unit(rest)
    return Quantity(value + percent, unit, unknown, marks)


def _unit(words: list[str]) -> tuple[str | None, frozenset[str]]:
    """Return the normalised unit, and its words if one of them is unknown."""
    power, parts, unknown = "", [], False
    for word in words:
        name, _, exponent = word.partition("^")
        if name.lower() in _POWERS:
            power = _POWERS[name.lower()]
            continue
        if name == "per":
            parts.append("/")
            continue
        spelling = _UNITS.get(name, _UNITS.get(name.lower()))
        unknown |= spelling is None
        name = spelling if spelling is not None else _singular(name.lower())
        parts.append(name + (f"^{exponent}" if exponent and name else power if name else ""))
        power = ""
    unit = "".join(part + " " * (part not in ("/", "")) for part in parts).replace(" /", "/").strip()
    unit = {"mph": "mi/h", "kph": "km/h"}.get(unit, unit)
    return unit or None, frozenset(unit.split()) if unknown else frozenset()


def _singular(name: str) -> str:
    if name.endswith("ies") and len(name) > 4:
        return name[:-3] + "y"
    if name.endswith(("ches", "shes", "sses", "xes")):
        return name[:-2]
    return name[:-1] if name.endswith("s") and not name.endswith("ss") else name


def _is_no_unit(word: str) -> bool:
    if word.isascii():
        return (
            word.lower() in _NO_UNIT
            or word.lower().partition("^")[0] in _FACTORS
            or not word.replace("^", "").replace("-", "").isalnum()
        )
    return word not in _UNITS and bool(_NO_UNIT_SIGNS & set(word))


def _may_be_unit(words: list[str], spaced: bool) -> bool:
    first = words[0].partition("^")[0]
    if not first.isascii():
        return True
    if len(words) == 1 and (first in _UNITS or first.lower() in _UNITS):
        return spaced or len(first) > 1  # "5m" may be five times m
    names = [word.partition("^")[0] for word in words]
    return spaced and all(len(name) > 2 or name in _UNITS or name in _POWERS for name in names)


def _chinese_factor(text: str) -> tuple[Fraction, str]:
    factor = Fraction(1)
    while text[:1] in _SIGNS and text.strip() not in _UNITS and text:
        factor, text = factor * _SIGNS[text[0]], text[1:]
    return factor, text
