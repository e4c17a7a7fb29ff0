"""Sets of real numbers: normalisation of intervals and inequalities."""

import re
from itertools import pairwise

_SIGN = r"\s?(<|>|\\le(?![a-z])|\\ge(?![a-z])|\\ne(?![a-z]))\s?"
_SPLIT = re.compile(_SIGN)
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w\}?)?'*")
_BUILDER = re.compile(r"\\\{\s?(\\?[A-Za-z]+)\s?(?:\\in\s?(?:\\mathbb\{R\}|R)\s?)?[|:]\s?(.*)\\\}")
_MEMBER = re.compile(r"(\\?[A-Za-z]+)\s?\\in(?![a-z])\s?(.*)")
_WITHOUT = re.compile(r"(?:\\mathbb\{R\}|R)\s?(?:\\setminus|\\backslash|-)\s?\\\{(.*)\\\}")
_REALS = ("\\mathbb{R}", "(-\\infty,\\infty)")
_TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}


def intervals_of(text: str) -> tuple[str | None, list[str]] | None:
    """Return the unknown (None if unnamed) and the intervals of a tidy text; None if it is not a set of this kind."""
    builder = _BUILDER.fullmatch(text)
    member = _MEMBER.fullmatch(text)
    if member:
        inner = intervals_of(member[2])
        return (member[1], inner[1]) if inner and inner[0] is None else None
    if builder:
        return intervals_of(builder[2])
    if text.replace(" ", "") == _REALS[0] or text.casefold() in ("all real numbers", "all reals"):
        return None, [_REALS[1]]
    without = _WITHOUT.fullmatch(text)
    if without:
        return None, _without(without[1].split(","))
    if _SPLIT.search(text):
        return _inequalities(text)
    pieces = [piece.strip() for piece in re.split(r"\\cup(?![a-z])", text)]
    shaped = all((piece[:1] in ("(", "[") and piece[-1:] in (")", "]")) or piece.startswith("\\{") for piece in pieces)
    return (None, pieces) if shaped else None


def _inequalities(text: str) -> tuple[str | None, list[str]] | None:
    unknown, intervals = None, []
    for alternative in text.split(","):
        pieces = [_inequality(part.strip()) for part in alternative.split("\\land")]
        read = [piece for piece in pieces if piece is not None]
        if len(read) < len(pieces) or len({name for name, _ in read} | ({unknown} if unknown else set())) > 1:
            return None
        unknown = read[0][0]
        if len(read) == 1:
            intervals += read[0][1]
            continue
        both = _both([piece[1] for piece in read])
        if both is None:
            return None
        intervals.append(both)
    return unknown, intervals


def _inequality(text: str) -> tuple[str, list[str]] | None:
    """Parse ``x<3``, ``3>x``, ``0<x\\le 5`` or ``x\\ne 2``."""
    parts = _SPLIT.split(text)
    if len(parts) == 3:
        left, sign, right = parts
        if not _NAME.fullmatch(left.strip()):
            left, sign, right = right, _TURNED[sign], left
        name, end = left.strip(), right.strip()
        if not _NAME.fullmatch(name) or not end or name in ("\\pi", "e"):
            return None
        if sign == "\\ne":
            return name, _without([end])
        if sign in ("<", "\\le"):
            return name, [f"(-\\infty,{end}{')' if sign == '<' else ']'}"]
        return name, [f"{'(' if sign == '>' else '['}{end},\\infty)"]
    if len(parts) == 5:
        low, first, name, second, high = (part.strip() for part in parts)
        if first in (">", "\\ge"):
            low, first, second, high = high, _TURNED[second], _TURNED.get(first, first), low
        if not _NAME.fullmatch(name) or not low or not high or {first, second} - {"<", "\\le"}:
            return None
        return name, [f"{'(' if first == '<' else '['}{low},{high}{')' if second == '<' else ']'}"]
    return None


def _both(sets: list[list[str]]) -> str | None:
    """Return the intersection of two half-lines, such as ``x>1`` and ``x<3``."""
    if len(sets) != 2 or any(len(intervals) != 1 for intervals in sets):
        return None
    (one,), (other,) = sets
    if one.startswith("(-\\infty,"):
        one, other = other, one
    if not one.endswith(",\\infty)") or not other.startswith("(-\\infty,"):
        return None
    return one.removesuffix(",\\infty)") + "," + other.removeprefix("(-\\infty,")


def _without(points: list[str]) -> list[str]:
    """Return the real line without the given sorted points."""
    ends = ["-\\infty", *(point.strip() for point in points), "\\infty"]
    return [f"({low},{high})" for low, high in pairwise(ends)]
