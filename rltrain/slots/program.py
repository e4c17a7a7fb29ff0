"""Runs a program that a model wrote in a separate interpreter (jail.py): no network, no files, no other processes.

Called from a function in a slot, which ends what a program leaves behind, and whose deadline ends it all.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

from rltrain.base.env import shipped
from rltrain.base.errors import ConfigError
from rltrain.slots.jail import MAX_FILE_BYTES
from rltrain.slots.limits import PROGRAMS_FOLDER, current_limits, has_ended, kill_tree, remove_folder

_JAIL = Path(__file__).with_name("jail.py")
_MEMORY_MB = 1024
_MARK = "__rltrain_needs_programs__"
_CHECK_S = 60.0
_NOT_ISOLATED = (
    "programs of the model were not run: this kernel grants neither user namespaces nor Landlock, so only checks "
    "inside Python would keep them from your files. Use a kernel with Landlock (Linux 5.13 or later), or read {0} and "
    "set reward.allow_unsandboxed_code=True (for a tool: actor_rollout_ref.rollout.multi_turn.allow_unsandboxed_code)."
)


@dataclass(frozen=True)
class Ending:
    """What has become of a program."""

    output: str
    """What it printed until then, at most 8 MiB; or what its function returned, as JSON."""
    exit_code: int | None
    """0 where it came to its end; None where its time was over."""
    layers: dict[str, int] = field(default_factory=dict)
    """Layers of isolation that held: namespaces, landlock (its ABI), seccomp; empty if it ended earlier."""


def needs_programs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a tool that runs programs: before a run it is refused unless they are allowed (`Limits`)."""
    setattr(function, _MARK, True)
    return function


def asks_for_programs(function: Callable[..., Any]) -> bool:
    """Whether `needs_programs` has marked a tool."""
    return getattr(function, _MARK, False)


def run_program(
    code: str, stdin: str = "", *, seconds: float, function: str | None = None, arguments: Sequence[Any] = ()
) -> str | None:
    """What the program prints (or its ``function`` returns, as JSON), "" if it fails, None if its time is over."""
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
    """Run a program, or its ``function``, for at most so many seconds.

    accepted: whether a kernel without namespaces and Landlock will do; None: as the limits of this process say.
    Raises ConfigError where it will not.
    """
    accepted = current_limits().allow_unsandboxed_code if accepted is None else accepted
    job: dict[str, Any] = {"code": code, "function": function, "arguments": list(arguments)}
    # RLIMIT_CPU counts whole seconds, so it is set beyond the wall clock, which decides.
    job |= {"seconds": math.ceil(seconds) + 1, "memory_mb": _MEMORY_MB, "parent": os.getpid()}
    # Files and no pipes: a program that prints without end is stopped by the limit on file sizes, and nobody must read
    # meanwhile.
    with (
        _scratch() as folder,
        tempfile.TemporaryFile() as stdin_file,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as spec,
    ):
        work, root = Path(folder, "work"), Path(folder, "root")  # root: where the jail builds its file system
        work.mkdir()
        root.mkdir()
        job |= {"root": str(root), "allow_unsandboxed": accepted}
        for stream, text in ((stdin_file, stdin), (spec, json.dumps(job))):
            stream.write(text.encode(errors="surrogateescape"))
            stream.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_JAIL), str(spec.fileno())], stdin=stdin_file, stdout=stdout,
            stderr=subprocess.DEVNULL, cwd=work, pass_fds=[spec.fileno()], start_new_session=True,
            env={"LANG": "C.UTF-8", "HOME": str(work), "TMPDIR": str(work), "PATH": os.defpath},
        )  # fmt: skip
        try:
            in_time = has_ended(process, seconds)
        finally:
            kill_tree(process.pid)
            process.wait()
        layers = _layers(spec)
        if layers and not (layers["namespaces"] or layers["landlock"] or accepted):
            raise ConfigError(_NOT_ISOLATED.format(shipped("docs/security.md")))
        stdout.seek(0)
        output = stdout.read(MAX_FILE_BYTES).decode(errors="replace")
        return Ending(output, process.returncode if in_time else None, layers)


@contextmanager
def _scratch() -> Iterator[str]:
    parent = os.environ.get(PROGRAMS_FOLDER)
    folder = tempfile.mkdtemp(dir=parent if parent and os.path.isdir(parent) else None)
    try:
        yield folder
    finally:
        remove_folder(folder)


def _layers(spec: IO[bytes]) -> dict[str, int]:
    """Read the report of the jail; {} if it was ended earlier."""
    spec.seek(0)
    try:
        report = json.loads(spec.read())
    except ValueError:
        return {}
    return {} if "code" in report else report
