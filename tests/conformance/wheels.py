"""Sources from the wheels of other packages, by version, without installing them or downloading whole wheels."""

from __future__ import annotations

import ast
import contextlib
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rltrain" / "wheels"
# The wheels of one Python version have the sources of all.
_FOR = ("--no-deps", "--only-binary", ":all:", "--python-version", "3.11")
_RESOURCES = contextlib.ExitStack()


class Unreachable(Exception):
    """The index lacks the wheel, or there is no index."""


class Wheel:
    """The sources of package ``name`` (pip's name) in ``version``."""

    def __init__(self, name: str, version: str) -> None:
        self.name, self.version = name, version
        self._folder = CACHE / f"{name}-{version}"
        self._trees: dict[str, ast.Module | None] = {}

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def text(self, path: str) -> str | None:
        """Return a file of the wheel, or None if it does not exist."""
        file, missing = self._folder / path, self._folder / f"{path}.missing"
        if file.is_file():
            return file.read_text()
        if missing.exists():
            return None
        archive = _archive(self.name, self.version)
        file.parent.mkdir(parents=True, exist_ok=True)
        if path not in archive.namelist():
            missing.touch()
            return None
        # Written atomically, because other processes may read it, and this process may be stopped.
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_bytes(archive.read(path))
        part.replace(file)
        return file.read_text()

    def module(self, name: str) -> ast.Module | None:
        """Return the syntax tree of a module, or None if it does not exist."""
        if name not in self._trees:
            base = name.replace(".", "/")
            text = next(
                (found for end in ("/__init__.py", ".py") if (found := self.text(base + end)) is not None), None
            )
            self._trees[name] = None if text is None else ast.parse(text)
        return self._trees[name]

    def is_package(self, name: str) -> bool:
        """Return whether a module is a folder, whose relative imports start one level lower."""
        return self.text(name.replace(".", "/") + "/__init__.py") is not None


@cache
def _archive(name: str, version: str) -> ZipFile:
    try:
        # pip itself warns (setuptools reports pkg_resources as old), and a test treats warnings as errors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ZipFile(_RESOURCES.enter_context(_ranges(name, version)))
    except Exception as error:
        # Other errors do not mean that the index is missing, and must not be skipped.
        if not isinstance(error, OSError) and not type(error).__module__.startswith("pip."):
            raise
        raise Unreachable(f"{name} {version}: {error}") from error


def _ranges(name: str, version: str) -> Any:
    """Return the wheel as a file that is read in ranges, with pip's own index, session and proxy."""
    from pip._internal.cli.cmdoptions import make_target_python
    from pip._internal.commands import create_command
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP

    command: Any = create_command("download")
    options, _ = command.parse_args([*_FOR, "--quiet", "--quiet", "--retries", "1", "--timeout", "10", name])
    _RESOURCES.enter_context(command.main_context())
    session = command.get_default_session(options)
    target = make_target_python(options)
    finder = command._build_package_finder(options, session, target_python=target, ignore_requires_python=True)
    found = [
        candidate
        for candidate in finder.find_all_candidates(name)
        if str(candidate.version) == version and candidate.link.is_wheel
    ]
    if not found:
        raise Unreachable(f"the package index has no wheel of {name} {version} for this machine")
    return LazyZipOverHTTP(found[0].link.url, session)
