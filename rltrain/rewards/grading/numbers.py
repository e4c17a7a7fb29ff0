"""Arithmetic of bounded size: exact fractions while they are small, otherwise 150 digits, real or complex.

A result that would be too large is not computed: `Unreadable` is raised first.
"""

from fractions import Fraction
from functools import cache
from typing import Any

# A fraction, or an mpmath number (mpmath has no type annotations).
Value = Any

MAX_EXPONENT = 1 << 18  # of the exponent of two, for a number of 150 digits
_MAX_BITS = 1 << 15  # of numerator and denominator of a fraction
_DIGITS = 150
TOLERANCE = Fraction(1, 10**100)


class Unreadable(ValueError):
    """The text is not a formula of moderate size."""


class Undefined(ArithmeticError):
    """The formula has no real value at this point."""


def same_number(one: Value, other: Value) -> bool:
    """Return True if two values are equal: fractions exactly, others to a hundred digits."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = lift(one), lift(other)
    size = max(abs(one), abs(other))
    # The second condition accepts values that cancel to zero, such as the sine of pi.
    return bool(abs(one - other) <= size * lift(TOLERANCE) or size <= lift(TOLERANCE) ** 1.3)


def near(one: Value, other: Value, tolerance: Fraction) -> bool:
    """Return True if two real values agree to a relative tolerance; False if ``other`` is an integer."""
    is_integer = other.denominator == 1 if isinstance(other, Fraction) else same_number(other, digits().nint(other))
    if not tolerance or is_integer:
        return False
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return abs(one - other) <= tolerance * abs(other)
    one, other = lift(one), lift(other)
    return bool(abs(one - other) <= lift(tolerance) * abs(other))


@cache
def digits() -> Any:
    """Return mpmath's context of 150 digits. Imported on first use, because the import takes 40 ms."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = _DIGITS
    return context


def lift(number: Value) -> Value:
    """Convert a value to 150 digits."""
    if isinstance(number, Fraction):
        return digits().mpf(number.numerator) / number.denominator
    return number


def _bounded(number: Value) -> Value:
    if isinstance(number, Fraction):
        bits = max(number.numerator.bit_length(), number.denominator.bit_length())
        return number if bits <= _MAX_BITS else _bounded(lift(number))
    if not digits().isfinite(number):
        raise Undefined
    if abs(digits().mag(number) if number else 0) > MAX_EXPONENT:
        raise Unreadable
    return number


def plus(one: Value, other: Value) -> Value:
    """Return the sum."""
    exact = isinstance(one, Fraction) and isinstance(other, Fraction)
    return _bounded(one + other if exact else lift(one) + lift(other))


def times(one: Value, other: Value) -> Value:
    """Return the product."""
    exact = isinstance(one, Fraction) and isinstance(other, Fraction)
    return _bounded(one * other if exact else lift(one) * lift(other))


def inverse(number: Value) -> Value:
    """Return the reciprocal. Raises `Undefined` for zero."""
    if not number if isinstance(number, Fraction) else abs(number) < lift(TOLERANCE):
        raise Undefined
    return 1 / number


def bounded_integer(number: Value, largest: int) -> int:
    """Return an integer from 0 to ``largest``. Raises `Undefined` or `Unreadable` for other values."""
    if not isinstance(number, Fraction) or number > largest:
        raise Unreadable
    if number.denominator > 1 or number < 0:
        raise Undefined
    return int(number)


def power(base: Value, exponent: Value) -> Value:
    """Return the power, exact if it is a fraction of moderate size."""
    if not base:
        if is_complex(exponent) or exponent < 0:
            raise Undefined
        return Fraction(0) if exponent else Fraction(1)
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * bits <= _MAX_BITS:
            return base ** int(exponent)
    base, exponent = lift(base), lift(exponent)
    if abs(exponent) > MAX_EXPONENT or abs(exponent) * (abs(digits().mag(base)) + 4) > MAX_EXPONENT:
        raise Unreadable
    return _bounded(base**exponent)


def is_complex(number: Value) -> bool:
    """Return True if the value has the complex type, even with a zero imaginary part."""
    return not isinstance(number, Fraction) and isinstance(number, digits().mpc)
