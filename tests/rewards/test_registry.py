"""How scorers are found, and what a missing package says."""

import subprocess
import sys
import textwrap

MINE = """
from rltrain.rewards.scorers.registry import scorer

@scorer("mine/*")
def mine(solution_str, ground_truth, extra_info):
    return 7.0
"""


def run(code):
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def test_a_new_scorer_is_one_new_file(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    code = f"""
        from rltrain.rewards import scorers
        from rltrain.rewards.scorers import registry
        scorers.__path__.append({str(tmp_path)!r})
        print(registry.find_scorer("mine/data")("4", "4", {{}}))
    """
    assert run(code) == ["7.0"]


def test_listing_scorers_imports_nothing_slow():
    code = """
        import sys
        from rltrain.rewards.scorers.registry import known_sources
        assert len(known_sources()) > 20
        print(*({"mpmath", "sympy", "reasoning_gym", "numpy", "torch", "ray"} & set(sys.modules)))
    """
    assert run(code) == []
