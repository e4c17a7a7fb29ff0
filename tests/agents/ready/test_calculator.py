"""The calculator: exact values, errors for invalid expressions, and no expression that takes long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.agents.ready.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3+4)*5/2", "17.5"),
        ("0.1+0.2", "0.3"),
        ("1e16+1", "10000000000000001"),
        ("2.5e3*2", "5000"),
        ("1/3", "0.333333333333"),
        ("10**15/3", "333333333333333.3333333333"),
        ("1234567890123456789*987654321987654321", str(1234567890123456789 * 987654321987654321)),
        ("2^10", "1024"),
        ("(-1)**(10**50+1)", "-1"),
        ("1,234*2=", "2468"),
        ("$12\u00d73\u00f74\u22121", "8"),
        ("sqrt(144)", "12"),
        ("round(2.567, 2)", "2.57"),
        ("gcd(12, 18) + lcm(4, 6)", "18"),
        ("1/7000000", "1.42857142857e-7"),
        ("+".join(["1"] * 400), "400"),
    ],
)
def test_values_are_exact_where_they_can_be(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "not an arithmetic expression"),
        ("\x00", "not an arithmetic expression"),
        ("1/0", "division by zero"),
        ("sqrt(-1)", "math domain error"),
        ("(-8)**(1/3)", "not a real number"),
        ("gcd(1.5, 2)", "1.5 is not an integer"),
        ("__import__('os').system('ls')", "only numbers"),
        ("().__class__", "only numbers"),
        ("min()", "at least 1 argument"),
        ("9**9**9", "too large"),
        ("2**-100000", "too large"),
        ("9.9**99999999", "too large"),
        ("1e999999999", "too large"),
        ("factorial(factorial(9))", "too large"),
        ("round(1, 10**9)", "too large"),
        ("-" * 999 + "1", "nested too deeply"),
        ("abs(" * 190 + "9**9**9" + ")" * 190, "too large"),
        ("1" * 2000, "at most 1000 characters"),
    ],
)
def test_invalid_expressions_return_an_error_at_once(expression, words):
    told = calculator(expression)  # before the test's timeout
    assert told.startswith("Error: ")
    assert words in told


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_text_raises(text):
    assert isinstance(calculator(text), str)
