"""The end of `scripts/test.sh` says what was not run and why, over all its processes."""

import subprocess
import sys

from tests import left_out

TESTS = """
import pytest
from pytest import mark

def test_passes(): pass

def test_fails(): assert 0

@pytest.fixture
def broken(): raise ValueError

def test_has_a_broken_fixture(broken): pass

def test_skips(): pytest.skip("no such device")

@pytest.mark.skipif(True, reason="no such package")
def test_is_skipped(): pass

@pytest.mark.long
def test_takes_long(): pass

@pytest.mark.long
@mark.fault("it survives")
def test_hurts(): pass
"""


def test_all_processes_are_in_the_closing_lines(tmp_path, monkeypatch):
    monkeypatch.setenv(left_out.RECORDS, str(tmp_path / "records"))
    (tmp_path / "records").mkdir()
    (tmp_path / "conftest.py").write_text(
        "from tests.left_out import LeftOut\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(LeftOut())\n"
        "    config.addinivalue_line('markers', 'long')\n"
        "    config.addinivalue_line('markers', 'fault(promise)')\n"
    )
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.skip('a whole file', allow_module_level=True)\n")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path), "-m", "not long"]
    processes = [
        subprocess.Popen([*command, *map(str, files)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for files in ([tmp_path / "test_one.py"], [tmp_path / "test_two.py", tmp_path / "test_module.py"])
    ]
    assert [process.wait() for process in processes] == [1, 1]
    files, reasons = left_out.joined(tmp_path / "records")
    report = left_out.report(files, reasons)
    assert report.endswith("\n2 passed, 4 failed, 5 skipped")
    for line in (
        "1  skipped, a whole file",
        "2  skipped, no such device",
        "2  skipped, no such package",
        "2  not selected, long: make test-long",
        "2  not selected, injects a fault: make test-faults",
    ):
        assert f"     {line}\n" in report
    assert "| `test_one.py` | 1 passed, 2 failed, 2 skipped |" in left_out.table(files)


def test_files_that_nobody_was_asked_to_run_are_counted_by_folder():
    tests = [file.relative_to(left_out.ROOT).as_posix() for file in (left_out.ROOT / "tests").rglob("test_*.py")]
    others = {"tests/hosts/test_docs.py", "tests/hosts/test_hosts.py", "tests/test_left_out.py"}
    said = left_out.unasked(set(tests) - others)
    assert said == f"3 of {len(tests)} files of tests are left to make test: 1 in tests, 2 in tests/hosts"
