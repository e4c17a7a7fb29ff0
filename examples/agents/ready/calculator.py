"""A calculator for the policy: arithmetic in Python's syntax, parsed to a tree and never run as code.

Integers and decimals are represented as fractions, so that 0.1+0.2 is 0.3 and 1/3*3 is 1. Roots and logarithms are
floating-point numbers unless they are exact. A power is bounded before it is computed: 9**9**9 is rejected within a
millisecond.
"""

import ast
import math
import operator
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

Number = Fraction | float

_MAX_CHARS = 1000
# Maximum bits of a numerator or denominator: about 1,200 digits.
_MAX_BITS = 4096
_MAX_EXPONENT = 1000
_MAX_FACTORIAL = 400
# Decimals shown for a fraction: with a finite and with an infinite expansion.
_MAX_PLACES, _ROUNDED_PLACES = 12, 10
_SHOWN_DIGITS = 12
# Operators as models write them, in addition to Python's.
_SIGNS = {"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-", "^": "**", "$": None}
_TABLE = str.maketrans(_SIGNS)


class _CannotCalculate(ValueError):
    """An error in an expression, as a message for the policy."""


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression exactly.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, sqrt, round, min, max, log, ..., such as "(3+4)*5/2".
    """
    try:
        return _shown(_evaluated(str(expression)))
    except _CannotCalculate as error:
        return f"Error: {error}"


def _evaluated(expression: str) -> Number:
    text = expression.strip().rstrip("=").strip().translate(_TABLE)
    # Outside of a call, 1,234 is one number, not two arguments.
    text = text if "(" in text else text.replace(",", "")
    if len(text) > _MAX_CHARS:
        raise _CannotCalculate(f"an expression has at most {_MAX_CHARS} characters.")
    try:
        return _value(ast.parse(text, mode="eval").body, text)
    except _CannotCalculate:
        raise
    except (SyntaxError, ValueError) as error:
        raise _CannotCalculate("this is not an arithmetic expression.") from error
    except (MemoryError, RecursionError) as error:
        raise _CannotCalculate("the expression is nested too deeply.") from error


def _shown(value: Number) -> str:
    """Return a value as text: exact if it has few decimals, else rounded."""
    if isinstance(value, float):
        return f"{value + 0.0:.{_SHOWN_DIGITS}g}"
    if (value * 10**_MAX_PLACES).denominator == 1:
        return _decimals(value, _MAX_PLACES)
    if abs(value) >= 1:
        return _decimals(value, _ROUNDED_PLACES)
    return f"{Decimal(value.numerator) / Decimal(value.denominator):.{_SHOWN_DIGITS}g}"


def _decimals(value: Fraction, places: int) -> str:
    whole, rest = divmod(round(abs(value) * 10**places), 10**places)
    return f"{'-' * (value < 0)}{whole}" + f".{rest:0{places}}".rstrip("0").rstrip(".")


def _value(node: ast.expr, text: str) -> Number:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _constant(node, text)
        case ast.Name(id=name) if name.lower() in _CONSTANTS:
            return _CONSTANTS[name.lower()]
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand, text)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, text)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _bounded(_OPERATORS[type(node.op)], _value(node.left, text), _value(node.right, text))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name], *(_value(argument, text) for argument in node.args))
        case _:
            raise _CannotCalculate("only numbers, operators and mathematical functions are supported.")


def _constant(node: ast.Constant, text: str) -> Number:
    if isinstance(node.value, float):
        # Convert from the text, so that 0.1 is a tenth. 1e999999999 as a fraction would exhaust the memory.
        written = Decimal((ast.get_source_segment(text, node) or "").replace("_", ""))
        if abs(written.adjusted()) > _MAX_EXPONENT:
            raise _CannotCalculate("the result is too large.")
        return _checked(Fraction(written))
    return _checked(node.value)


def _bounded(function: Callable[..., Any], *arguments: Number) -> Number:
    try:
        return _checked(function(*arguments))
    except _CannotCalculate:
        raise
    except ZeroDivisionError as error:
        raise _CannotCalculate("division by zero.") from error
    except OverflowError as error:
        raise _CannotCalculate("the result is too large.") from error
    except (TypeError, ValueError) as error:
        raise _CannotCalculate(f"{error}.") from error


def _checked(value: Any) -> Number:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise _CannotCalculate("the result is not a real number.")
    if isinstance(value, float):
        return value
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise _CannotCalculate("the result is too large.")
    return Fraction(value)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, float) or isinstance(exponent, float) or exponent.denominator != 1:
        return float(base) ** float(exponent)
    times = exponent.numerator
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size > 1 and (size - 1) * abs(times) > _MAX_BITS:
        raise _CannotCalculate("the result is too large.")
    if size <= 1:  # for 0, 1 and -1 only sign and parity of the exponent matter
        times = ((times > 0) - (times < 0)) * (2 - times % 2)
    return base**times


def _whole(value: Number, most: int | None = None) -> int:
    if isinstance(value, float) or value.denominator != 1:
        raise _CannotCalculate(f"{_shown(value)} is not an integer.")
    if most is not None and abs(value) > most:
        raise _CannotCalculate("the result is too large.")
    return value.numerator


def _root(value: Number) -> Number:
    """Return the root, exact if possible."""
    if isinstance(value, Fraction) and value >= 0:
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root**2 == value:
            return root
    return math.sqrt(value)


_CONSTANTS = {"pi": math.pi, "e": math.e}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": _root, "abs": abs, "floor": math.floor, "ceil": math.ceil, "min": min, "max": max, "pow": _power,
    "log": math.log, "ln": math.log, "log10": math.log10, "log2": math.log2, "exp": math.exp, "sin": math.sin,
    "cos": math.cos, "tan": math.tan, "asin": math.asin, "acos": math.acos, "atan": math.atan,
    "sum": lambda *numbers: sum(numbers, Fraction(0)),
    "round": lambda number, places=Fraction(0): round(number, _whole(places, _MAX_FACTORIAL)),
    "gcd": lambda *numbers: math.gcd(*map(_whole, numbers)),
    "lcm": lambda *numbers: math.lcm(*map(_whole, numbers)),
    "factorial": lambda number: math.factorial(_whole(number, _MAX_FACTORIAL)),
    "comb": lambda all_, chosen: math.comb(_whole(all_, _MAX_FACTORIAL), _whole(chosen)),
}  # fmt: skip
