"""Execution of a program that a model wrote in a separate interpreter (jail.py): no network, no files, no other
processes.

Called from a function in a slot, which ends remaining processes of a program and enforces the deadline.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rltrain.common.env import shipped
from rltrain.common.errors import ConfigError
from rltrain.runtime.slots.jail import MAX_FILE_BYTES
from rltrain.runtime.slots.limits import PROGRAMS_FOLDER, current_limits, remove_folder
from rltrain.runtime.slots.process import run_within

_JAIL = Path(__file__).with_name("jail.py")
_MEMORY_MB = 1024
_MARK = "__rltrain_needs_programs__"
_CHECK_S = 60.0
_NOT_ISOLATED = (
    "programs of the model were not run: this kernel supports neither user namespaces nor Landlock, so only checks "
    "inside Python would protect your files. Use a kernel with Landlock (Linux 5.13 or later), or read {0} and set "
    "reward.allow_unsandboxed_code=True (for a tool: actor_rollout_ref.rollout.multi_turn.allow_unsandboxed_code)."
)


@dataclass(frozen=True)
class Ending:
    """The result of a program."""

    output: str
    """The output so far, at most 8 MiB; or the function's return value, as JSON."""
    exit_code: int | None
    """0 if it ended normally; None after a timeout."""
    layers: dict[str, int] = field(default_factory=dict)
    """Active layers of isolation: namespaces, landlock (its ABI), seccomp; empty if it ended earlier."""


def needs_programs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a tool that runs programs: it is rejected before a run unless programs are allowed (`Limits`)."""
    setattr(function, _MARK, True)
    return function


def asks_for_programs(function: Callable[..., Any]) -> bool:
    """Return True if `needs_programs` has marked a tool."""
    return getattr(function, _MARK, False)


def run_program(
    code: str, stdin: str = "", *, seconds: float, function: str | None = None, arguments: Sequence[Any] = ()
) -> str | None:
    """Return the program's output (or its ``function``'s result, as JSON), "" if it fails, None after a timeout."""
    ending = end_of_program(code, stdin, seconds=seconds, function=function, arguments=arguments)
    if ending.exit_code is None:
        return None
    return "" if ending.exit_code else ending.output


@cache
def check_isolation(accepted: bool | None = None) -> None:
    """Raise ConfigError unless this kernel isolates the files of a program, or ``accepted`` (as `end_of_program`)."""
    end_of_program("", seconds=_CHECK_S, accepted=accepted)


def end_of_program(
    code: str,
    stdin: str = "",
    *,
    seconds: float,
    function: str | None = None,
    arguments: Sequence[Any] = (),
    accepted: bool | None = None,
) -> Ending:
    """Run a program, or its ``function``, for at most ``seconds``.

    accepted: whether a kernel without namespaces and Landlock is accepted; None: by the limits of this process. Raises
    ConfigError if it is not.
    """
    accepted = current_limits().allow_unsandboxed_code if accepted is None else accepted
    job: dict[str, Any] = {"code": code, "function": function, "arguments": list(arguments)}
    # RLIMIT_CPU counts whole seconds, so it is set above the wall-clock limit, which takes effect first.
    job |= {"seconds": math.ceil(seconds) + 1, "memory_mb": _MEMORY_MB, "parent": os.getpid()}
    # Files instead of pipes, because the file size limit stops a program that prints endlessly, and no reader is
    # needed.
    with (
        _scratch() as folder,
        tempfile.TemporaryFile() as stdin_file,
        tempfile.TemporaryFile() as stdout,
    ):
        work, root = Path(folder, "work"), Path(folder, "root")  # root: folder in which the jail builds its file system
        work.mkdir()
        root.mkdir()
        job |= {"root": str(root), "allow_unsandboxed": accepted}
        stdin_file.write(stdin.encode(errors="surrogateescape"))
        stdin_file.seek(0)
        variables = {"LANG": "C.UTF-8", "HOME": str(work), "TMPDIR": str(work), "PATH": os.defpath}
        code_of_jail, layers = run_in_jail(_JAIL, job, seconds, variables, stdin=stdin_file, stdout=stdout, cwd=work)
        if layers and not (layers["namespaces"] or layers["landlock"] or accepted):
            raise ConfigError(_NOT_ISOLATED.format(shipped("docs/security.md")))
        stdout.seek(0)
        output = stdout.read(MAX_FILE_BYTES).decode(errors="replace")
        return Ending(output, code_of_jail, layers)


def run_in_jail(
    jail: Path, job: Mapping[str, Any], seconds: float, environment: Mapping[str, str] | None = None, **streams: Any
) -> tuple[int | None, dict[str, Any]]:
    """Run the script of a jail on a job. Return its exit code (None after the time) and the report that it has written
    in place of the job; {} if it ended earlier.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as spec:
        json.dump(job, spec)
        spec.seek(0)
        command = [sys.executable, "-I", "-S", str(jail), str(spec.fileno())]
        streams = {"stderr": subprocess.DEVNULL, "pass_fds": [spec.fileno()], **streams}
        code = run_within(seconds, command, environment=environment, **streams)
        spec.seek(0)
        try:
            report = json.load(spec)
        except ValueError:
            report = job
    return code, {} if report.keys() == job.keys() else report


@contextmanager
def _scratch() -> Iterator[str]:
    parent = os.environ.get(PROGRAMS_FOLDER)
    folder = tempfile.mkdtemp(dir=parent if parent and os.path.isdir(parent) else None)
    try:
        yield folder
    finally:
        remove_folder(folder)
