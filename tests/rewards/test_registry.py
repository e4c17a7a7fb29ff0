"""How scorers are found, and what a missing package says."""

import subprocess
import sys
import textwrap

import pytest

from rltrain.errors import RewardError
from rltrain.rewards.processes.slot import Slot

MINE = """
from rltrain.rewards.registry import scorer

@scorer("mine/*")
def mine(solution_str, ground_truth, extra_info):
    return 7.0
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_new_scorer_is_one_new_file(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    code = f"""
        from rltrain.rewards import registry, scorers
        scorers.__path__.append({str(tmp_path)!r})
        print(registry.find_scorer("mine/data")("4", "4", {{}}))
    """
    assert run(code) == ["7.0"]


def test_listing_scorers_imports_nothing_slow():
    code = """
        import sys
        from rltrain.rewards.registry import known_sources
        assert len(known_sources()) > 20
        print(*({"math_verify", "sympy", "reasoning_gym", "numpy", "torch", "ray"} & set(sys.modules)))
    """
    assert run(code) == []


@pytest.fixture
def without_math_verify(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('not installed')")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("source", ["lighteval/MATH", "boba", "hiyouga/geometry3k", "virl39k"])
def test_algebra_without_math_verify_is_refused(without_math_verify, source):
    with Slot() as slot, pytest.raises(RewardError) as caught:
        slot.check((source, "5", "5", {}))
    assert repr(source) in str(caught.value)
    assert "pip install 'rltrain[math]'" in str(caught.value)


def test_sources_without_algebra_need_no_package(without_math_verify):
    with Slot() as slot:
        assert slot.score("math_dapo", "Answer: 34", "34", {}).value == 1.0
        assert slot.score("openai/gsm8k", "#### 34", "34", {}).value == 1.0
