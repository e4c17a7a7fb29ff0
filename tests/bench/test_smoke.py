"""The first command of every benchmark, with `--smoke`, finishes, prints its table and writes nothing to bench/ and
docs/."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.forked import Done, run_module

ROOT = Path(__file__).parents[2]
# `command [optional arguments]` in the first column.
COMMANDS = re.findall(r"^\| `([^`\[]+?)(?: \[[^`]*\])?` ", (ROOT / "bench/README.md").read_text(), re.MULTILINE)
PROGRAMS = {re.search(r"bench\.(\w+)", command)[1]: command for command in reversed(COMMANDS)}


def files() -> dict[Path, int]:
    """Return the modification times of the files in bench/ and docs/."""
    found = [path for top in ("bench", "docs") for path in (ROOT / top).rglob("*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in found if path.suffix != ".pyc"}


def test_each_program_has_a_row():
    programs = {path.stem for path in (ROOT / "bench").glob("*.py") if "\n    main()\n" in path.read_text()}
    programs |= {"bits", "soak"}  # which exit with the result of main
    assert set(PROGRAMS) == programs - {"ages", "step_peer", "step_verl"}


@pytest.fixture(scope="module")
def runs(request):
    """The runs of all tested commands, two at a time, because one pytest process runs all tests of a file."""
    asked = [item.callspec.params["command"] for item in request.session.items if "runs" in item.fixturenames]
    with ThreadPoolExecutor(2) as pool:
        yield {command: pool.submit(run, command) for command in asked}


def run(command: str) -> Done:
    variables, _, words = command.rpartition("python -m ")
    return run_module(*words.split(), "--smoke", **dict(word.split("=") for word in variables.split()))


@pytest.mark.timeout(3600)  # the first case waits for those before it
@pytest.mark.parametrize("command", PROGRAMS.values(), ids=PROGRAMS)
def test_a_benchmark_runs_and_writes_nothing(runs, command):
    before = files()
    done = runs[command].result()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    # A table, or the digest of bench.bits.
    assert re.search(r"^\|(---\|)+\n\| .+ \|$|^\w+ \(\d rank\): [0-9a-f]{64}$", done.stdout, re.MULTILINE), done.stdout
    assert files() == before
