"""Commands in forked processes, because interpreters and imports would take most of their time."""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rltrain import commands
from tests.ranks import preload


class Done(NamedTuple):
    """The result of a command, like subprocess.CompletedProcess."""

    returncode: int
    stdout: str
    stderr: str


def run_module(name: str, *arguments: str, **variables: str) -> Done:
    """Run ``python -m name ARGUMENTS`` in a process that is forked after the imports of `tests.preloaded`."""
    environment = preload()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        words = (name, arguments, environment | variables, os.getcwd(), files)
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=words)
        process.start()
        process.join()
        texts = [file.read_text(errors="replace") for file in files]
    return Done(process.exitcode or 0, *texts)


def _run(name: str, arguments: tuple[str, ...], environment: dict[str, str], folder: str, files: list[Path]) -> None:
    for descriptor, file in enumerate(files, 1):  # programs that the command starts write there too
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    # The fork server has the environment and the folder of the test that started it.
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [name, *arguments]
    sys.modules.pop(commands.home(name) or name, None)  # runpy warns about a module that is already imported
    runpy.run_module(name, run_name="__main__", alter_sys=True)
