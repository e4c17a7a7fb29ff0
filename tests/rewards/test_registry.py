"""Selection of scorers, and errors for missing packages."""

import subprocess
import sys
import textwrap


def run(code):
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def test_listing_scorers_imports_nothing_slow():
    code = """
        import sys
        from rltrain.rewards.scorers.registry import known_sources
        assert len(known_sources()) > 20
        print(*({"mpmath", "sympy", "reasoning_gym", "numpy", "torch", "ray"} & set(sys.modules)))
    """
    assert run(code) == []
