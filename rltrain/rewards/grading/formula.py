"""Evaluation of LaTeX formulas at sample points, for which values are chosen for their letters. Two formulas are equal
if they are equal at all sample points, which have both signs. The arithmetic uses rational numbers as long as these are
exact, otherwise 150 digits, because a tolerance would make 1/2^60 and 1/2^61 equal. Letters are real numbers: points at
which a root or a logarithm becomes complex are skipped (unless the formula contains i). A model may write anything, so
sizes are bounded before the computation: a tower of powers or a huge factorial is unreadable, and an unreadable formula
equals nothing.
"""

import math
import re
import zlib
from fractions import Fraction

from rltrain.rewards.grading.numbers import (
    MAX_EXPONENT,
    TOLERANCE,
    Undefined,
    Unreadable,
    Value,
    bounded_integer,
    digits,
    inverse,
    is_complex,
    lift,
    plus,
    power,
    same_number,
    times,
)  # fmt: skip

_MAX_CHARS = 512
_MAX_DEPTH = 24
_MAX_ARGUMENT = 1 << 200
_MAX_FACTORIAL = 1000
# Values of letters: range, denominator (1: integers), and which half is negative.
_POINTS = (
    (3, 97, 0), (40, 101, 0), (1, 103, 0), (3, 107, 1), (40, 109, -1),
    (9, 1, 0), (30, 1, 0), (5, 1, 0), (12, 1, 0), (20, 1, 0), (7, 1, 0), (15, 1, 0), (40, 1, 0),
)  # fmt: skip
_NUM_FRACTIONAL = 5

_TOKEN = re.compile(r"\s+|([0-9]+(?:\.[0-9]+)?|\.[0-9]+)|\\([A-Za-z]+|[%{}|])|([A-Za-z]+)|([-+*/^_(){}\[\]|!:'%])")
_WORDS = frozenset(("sqrt", "pi", "sin", "cos", "tan", "log", "ln", "exp"))
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)
_GREEK = frozenset(_GREEK_NAMES.split())
_FUNCTION_NAMES = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp"
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_INVERSES = {"sin": "asin", "cos": "acos", "tan": "atan", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
_TIMES = frozenset(("cdot", "times", "*"))
_OVER = frozenset(("/", "div", ":"))
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "lfloor": "rfloor", "lceil": "rceil", "|": "|"}
_STARTS = frozenset(("(", "[", "{", "|", "lfloor", "lceil", "frac", "sqrt", "binom", "pi")) | _FUNCTIONS | _GREEK


def value(text: str) -> Value | None:
    """Return the value of a formula without letters: a fraction, or a real or complex number of 150 digits."""
    try:
        reading = _Reading(text, 0, allow_complex=True)
        return None if reading.names else reading.result
    except (Unreadable, Undefined):
        return None


def names(text: str) -> set[str] | None:
    """Return the letters of a formula; None for an unreadable one."""
    for point in range(len(_POINTS)):
        try:
            return _Reading(text, point, allow_complex=True).names
        except Undefined:
            continue
        except Unreadable:
            return None
    return None


def same_formula(one: str, other: str) -> bool:
    """Return True if two formulas have the same value for all values of their letters."""
    bases = (None, 10) if "\\log" in one + other else (None,)
    return any(_agree(one, other, base, proportional=False) for base in bases)


def same_equation(one: str, other: str) -> bool:
    """Return True if two equations are the same up to a factor: ``y=2x+3`` and ``2x-y=-3``."""
    if one.count("=") != 1 or other.count("=") != 1:
        return False
    ours, theirs = ("({})-({})".format(*text.split("=")) for text in (one, other))
    return _agree(ours, theirs, None, proportional=True)


def _agree(one: str, other: str, log_base: int | None, proportional: bool) -> bool:
    for allow_complex in (False, True):
        pairs: list[tuple[Value, Value]] = []
        for point in range(len(_POINTS)):
            if point >= _NUM_FRACTIONAL and len(pairs) > 1:
                break  # integer points are only for formulas that need them, such as factorials and (-1)^n
            try:
                ours, theirs = (_Reading(text, point, allow_complex, log_base) for text in (one, other))
            except Undefined:
                continue
            except Unreadable:
                return False
            if not proportional and not same_number(ours.result, theirs.result):
                return False
            if not ours.names and not theirs.names:
                return not proportional
            pairs.append((ours.result, theirs.result))
        if len(pairs) > 1:
            return not proportional or _in_proportion(pairs)
    return False


def _in_proportion(pairs: list[tuple[Value, Value]]) -> bool:
    (ours, theirs), *others = pairs
    if same_number(ours, Fraction(0)) or same_number(theirs, Fraction(0)):
        return False
    return all(same_number(times(ours, second), times(theirs, first)) for first, second in others)


class _Reading:
    """Evaluation of one formula at one point, by recursive descent: ``result``, and the ``names`` of its letters."""

    def __init__(self, text: str, point: int, allow_complex: bool, log_base: int | None = None) -> None:
        self.tokens, self.position, self.depth, self.bars = _tokens(text), 0, 0, 0
        self.point, self.log_base = point, log_base
        self.allow_complex = allow_complex or "i" in self.tokens
        self.names: set[str] = set()
        self.result = self._sum()
        if self.position < len(self.tokens):
            raise Unreadable

    def _peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self.position += 1
        return token

    def _take(self, *tokens: str) -> str:
        return self._next() if self._peek() in tokens and self._peek() else ""

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise Unreadable

    def _sum(self) -> Value:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise Unreadable
        total = self._product()
        while sign := self._take("+", "-"):
            term = self._product()
            total = plus(total, -term if sign == "-" else term)
        self.depth -= 1
        return total

    def _product(self) -> Value:
        if sign := self._take("-", "+"):
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise Unreadable
            factor = self._product()
            self.depth -= 1
            return -factor if sign == "-" else factor
        product = self._power()
        while True:
            if self._take(*_TIMES):
                product = times(product, self._signed())
            elif self._take(*_OVER):
                product = times(product, inverse(self._signed()))
            elif self._starts():
                product = times(product, self._power())
            else:
                return product

    def _signed(self) -> Value:
        return -self._power() if self._take("-") else self._power()

    def _starts(self) -> bool:
        """Return True if a factor begins here; adjacent factors are multiplied."""
        token = self._peek()
        if token == "|":
            return not self.bars
        if token[:1].isdigit():
            return self.tokens[self.position - 1] in ("!", ")")
        return token in _STARTS or (len(token) == 1 and token.isalpha())

    def _power(self) -> Value:
        base = self._atom()
        while True:
            if self._take("!"):
                base = Fraction(math.factorial(bounded_integer(base, _MAX_FACTORIAL)))
            elif self._take("%"):
                base = times(base, Fraction(1, 100))
            elif self._peek() == "^":
                self.position += 1
                if self._degree():
                    base = times(base, digits().pi / 180)
                else:
                    return self._raise(base, self._exponent())
            else:
                return base

    def _degree(self) -> bool:
        for form in (["circ"], ["{", "circ", "}"]):
            if self.tokens[self.position : self.position + len(form)] == form:
                self.position += len(form)
                return True
        return False

    def _exponent(self) -> Value:
        if self._take("-"):
            return -self._exponent()
        return self._group("{", "}") if self._peek() == "{" else self._atom()

    def _group(self, opening: str, closing: str) -> Value:
        self._expect(opening)
        outer, self.bars = self.bars, int(closing == "|")
        inner = self._sum()
        self.bars = outer
        self._expect(closing)
        return inner

    def _argument(self) -> Value:
        """Parse a group in braces, or one token: TeX reads ``\\sqrt23`` as the root of two, times three."""
        if self._peek() == "{":
            return self._group("{", "}")
        token = self._peek()
        if token[:1].isdigit() and len(token) > 1 and token.isdigit():
            self.tokens[self.position : self.position + 1] = [token[0], token[1:]]
        return self._atom()

    def _atom(self) -> Value:
        token = self._next()
        if token[:1].isdigit() or token[:1] == ".":
            return self._number(token)
        if token in _CLOSING:
            self.position -= 1
            inner = self._group(token, _CLOSING[token])
            return self._measured(token, inner) if token in ("lfloor", "lceil", "|") else inner
        if token == "frac":
            upper = self._argument()
            return times(upper, inverse(self._argument()))
        if token == "sqrt":
            index = self._group("[", "]") if self._peek() == "[" else Fraction(2)
            return self._root(self._argument(), index)
        # over a number this means its conjugate; over letters it is a name, which is compared as text
        if token in ("overline", "bar"):
            letters = len(self.names)
            number = self._argument()
            if len(self.names) > letters or isinstance(number, Fraction):
                raise Unreadable
            return digits().conj(number)
        if token == "binom":
            upper, lower = self._argument(), self._argument()
            return Fraction(math.comb(bounded_integer(upper, _MAX_FACTORIAL), bounded_integer(lower, _MAX_FACTORIAL)))
        if token in _FUNCTIONS:
            return self._function(token)
        if token == "pi":
            return +digits().pi
        if token in _GREEK or (len(token) == 1 and token.isalpha()):
            return self._letter(token)
        raise Unreadable

    def _number(self, token: str) -> Value:
        if self._peek() == "_":
            raise Unreadable  # digits of another base
        whole = Fraction(token)
        # "1\frac{1}{2}" is a mixed number; digits directly after digits are invalid.
        mixed = self.tokens[self.position : self.position + 7]
        shape = [part for part in mixed if not part.isdigit()] == ["frac", "{", "}", "{", "}"]
        if token.isdigit() and shape and mixed[2].isdigit() and mixed[5].isdigit() and int(mixed[5]):
            self.position += 7
            return whole + Fraction(int(mixed[2]), int(mixed[5]))
        return whole

    def _measured(self, kind: str, inner: Value) -> Value:
        if kind == "|":
            return abs(inner)
        if isinstance(inner, Fraction):
            return Fraction(math.floor(inner) if kind == "lfloor" else math.ceil(inner))
        return digits().floor(inner) if kind == "lfloor" else digits().ceil(inner)

    def _letter(self, token: str) -> Value:
        if self._take("_"):
            if self._peek() == "{":
                end = self.tokens.index("}", self.position) if "}" in self.tokens[self.position :] else 0
                if not end:
                    raise Unreadable
                token += "_" + "".join(self.tokens[self.position + 1 : end])
                self.position = end + 1
            else:
                token += "_" + self._next()
        while self._take("'"):
            token += "'"
        if token == "i":
            return digits().mpc(0, 1)
        if token == "e":
            return +digits().e
        if self._peek() == "(" and token in ("f", "g", "h"):
            raise Unreadable  # a function's value, not a product
        self.names.add(token)
        return self._at(token)

    def _at(self, name: str) -> Fraction:
        """Return the value of a letter at this point: the same in every formula, and not a special number."""
        reach, denominator, negative = _POINTS[self.point]
        drawn = zlib.crc32(f"{name} at {self.point}".encode())
        magnitude = Fraction(drawn % (reach * denominator) + 1, denominator)
        half = 1 if zlib.crc32(name.encode()) % 97 % 2 else -1
        return -magnitude if half == negative else magnitude

    def _function(self, name: str) -> Value:
        base: Value = None
        if name == "log" and self._take("_"):
            base = self._argument()
        exponent = None
        if self._take("^"):
            exponent = self._exponent()
        if name == "log" and base is None and self._take("_"):
            base = self._argument()
        argument = self._applied_to()
        if exponent == -1 and name in _INVERSES and isinstance(exponent, Fraction):
            name, exponent = f"arc{name}", None
        result = self._apply(name, argument, base)
        return result if exponent is None else self._raise(result, exponent)

    def _applied_to(self) -> Value:
        """Parse the argument of a function: in brackets, or the next factors up to a sign or another function."""
        if self._peek() in ("(", "[", "{", "|"):
            return self._atom()
        if self._take("-"):
            return -self._applied_to()
        product = self._power()
        while self._starts() and self._peek() not in _FUNCTIONS and self._peek() not in ("(", "["):
            product = times(product, self._power())
        return product

    def _apply(self, name: str, argument: Value, base: Value) -> Value:
        mp, number = digits(), lift(argument)
        if abs(number) > (MAX_EXPONENT if name in ("exp", "sinh", "cosh", "tanh") else _MAX_ARGUMENT):
            raise Unreadable
        if name in ("ln", "log", "lg"):
            if not number:
                raise Undefined
            base = base if base is not None else {"log": self.log_base, "lg": 10}.get(name)
            if base is not None and not base:
                raise Undefined
            scale = Fraction(1) if base is None else inverse(mp.log(lift(Fraction(base) if base == 10 else base)))
            return self._real(times(mp.log(number), scale))
        if name in ("cot", "sec", "csc"):
            return inverse(getattr(mp, {"cot": "tan", "sec": "cos", "csc": "sin"}[name])(number))
        if name == "tan" and abs(mp.cos(number)) < lift(TOLERANCE):
            raise Undefined
        return self._real(getattr(mp, _INVERSES[name] if name.startswith("arc") else name)(number))

    def _root(self, number: Value, index: Value) -> Value:
        odd = isinstance(index, Fraction) and index.denominator == 1 and index % 2 == 1
        if odd and not is_complex(number) and number < 0:  # the cube root of -8 is -2
            return -self._raise(-number, inverse(index))
        return self._raise(number, inverse(index))

    def _raise(self, base: Value, exponent: Value) -> Value:
        return self._real(power(base, exponent))

    def _real(self, number: Value) -> Value:
        if is_complex(number):
            if not number.imag:
                return number.real
            if not self.allow_complex:
                raise Undefined
        return number


def _tokens(text: str) -> list[str]:
    """Return the tokens of a formula: numbers, commands without their backslash, single letters, signs."""
    if len(text) > _MAX_CHARS:
        raise Unreadable
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise Unreadable
        position = match.end()
        number, command, word, sign = match.groups()
        if word and word not in _WORDS:
            if len(word) > 2:
                raise Unreadable  # a word is not a product of letters
            tokens.extend(word)
        elif number or command or word or sign:
            tokens.append(f"\\{command}" if command in ("{", "}") else number or command or word or sign)
    return tokens
