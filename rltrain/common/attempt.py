"""Reports of a program to its parent `rltrain.supervise`: JSON lines in a file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Environment variable with the path of the file.
ATTEMPT = "RLTRAIN_ATTEMPT"
NO_REPORT = "the program ended without a report (exit code 1)"


def report_to_supervisor(**facts: Any) -> None:
    """Report ``facts`` to the supervisor, if there is one."""
    if file := os.environ.get(ATTEMPT):
        with suppress(OSError), open(file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(facts) + "\n")


def read_reports(file: str | Path) -> dict[str, Any]:
    """Return the reports in ``file``. ``pids`` starts with the outermost program."""
    report: dict[str, Any] = {"pids": []}
    # A line cut off when the program died is not valid JSON.
    with suppress(OSError):
        for line in Path(file).read_text("utf-8", "replace").splitlines():
            with suppress(ValueError):
                report |= (facts := json.loads(line))
                report["pids"] += [facts["pid"]] if "pid" in facts else []
    return report


def shell_code(returncode: int) -> int:
    """Return the exit code that a shell reports for a `subprocess` return code."""
    return returncode if returncode >= 0 else 128 - returncode


def interpret_exit(code: int, report: dict[str, Any]) -> tuple[int, str]:
    """Return exit code and cause of a program that ended with ``code``.

    Both are read from the report, because a library may end the program with another code. Ray does so when its
    processes are gone.
    """
    cause = str(report.get("error", ""))
    if code != 1 or not report["pids"] or "ended" in report:
        return code, cause
    return (report.get("ends", code), cause) if cause else (75, NO_REPORT)


@contextmanager
def attempt_file() -> Iterator[str]:
    """Yield the file for the reports of a child command: the supervisor's, if there is one."""
    if file := os.environ.get(ATTEMPT):
        yield file
        return
    with tempfile.NamedTemporaryFile(prefix="rltrain_attempt_") as attempt:
        yield attempt.name
