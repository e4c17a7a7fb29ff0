"""Numbers of bounded size: exact fractions as long as these are small, otherwise 150 digits, real or complex.

What would be too large is not computed: it raises `Unreadable` before it costs anything.
"""

from fractions import Fraction
from functools import cache
from typing import Any

# A fraction, or a number of mpmath's, which has no types.
Value = Any

MAX_EXPONENT = 1 << 18  # of two, for a number in digits
_MAX_BITS = 1 << 15  # of a fraction
_DIGITS = 150
TOLERANCE = Fraction(1, 10**100)


class Unreadable(ValueError):
    """The text is no formula of a modest size."""


class Undefined(ArithmeticError):
    """The formula has no real value at this point."""


def same_number(one: Value, other: Value) -> bool:
    """Whether two values are one number: fractions exactly, others to a hundred digits."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = lift(one), lift(other)
    size = max(abs(one), abs(other))
    # The second bound is for what cancels to zero, such as the sine of pi.
    return bool(abs(one - other) <= size * lift(TOLERANCE) or size <= lift(TOLERANCE) ** 1.3)


def near(one: Value, other: Value, tolerance: Fraction) -> bool:
    """Whether two real values agree to a relative tolerance. A whole number is never rounded."""
    whole = other.denominator == 1 if isinstance(other, Fraction) else same_number(other, digits().nint(other))
    if not tolerance or whole:
        return False
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return abs(one - other) <= tolerance * abs(other)
    one, other = lift(one), lift(other)
    return bool(abs(one - other) <= lift(tolerance) * abs(other))


@cache
def digits() -> Any:
    """Arithmetic of 150 digits. Imported at its first use: it takes 40 ms."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = _DIGITS
    return context


def lift(number: Value) -> Value:
    """A value in digits."""
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
    """A sum."""
    exact = isinstance(one, Fraction) and isinstance(other, Fraction)
    return _bounded(one + other if exact else lift(one) + lift(other))


def times(one: Value, other: Value) -> Value:
    """A product."""
    exact = isinstance(one, Fraction) and isinstance(other, Fraction)
    return _bounded(one * other if exact else lift(one) * lift(other))


def inverse(number: Value) -> Value:
    """One over a number that is not zero."""
    if not number if isinstance(number, Fraction) else abs(number) < lift(TOLERANCE):
        raise Undefined
    return 1 / number


def whole_number(number: Value, largest: int) -> int:
    """A whole number from 0, at most ``largest``."""
    if not isinstance(number, Fraction) or number > largest:
        raise Unreadable
    if number.denominator > 1 or number < 0:
        raise Undefined
    return int(number)


def power(base: Value, exponent: Value) -> Value:
    """A power, exact where it is a fraction of a modest size."""
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
    """Whether a value is of the complex type, whatever its imaginary part."""
    return not isinstance(number, Fraction) and isinstance(number, digits().mpc)
