"""The stand-in device is as true and as strict as these promises say."""

import pytest

from tests.npu.standin import run


@pytest.mark.parametrize("check", ["trains", "is_strict", "has_streams_and_randomness"])
def test_the_device(check):
    run(f"tests.npu.checks:{check}")


def test_memory_is_counted_and_ends():
    run("tests.npu.checks:counts_memory", cap=1 << 20)


def test_without_a_compiler_the_tests_fail_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"g\+\+ is not there: apt-get install g\+\+"):
        run("print()")
