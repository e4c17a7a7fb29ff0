"""``python -m rltrain.main_ppo key=value ...``: parse, check, run."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from rltrain.common.attempt import report_to_supervisor
from rltrain.common.errors import (
    ConfigError,
    Interrupted,
    RltrainError,
    lenient_output,
    replace_surrogates,
    sanitize,
    system_error,
)
from rltrain.common.secrets import masked_text
from rltrain.common.stop import Stop, listen
from rltrain.config.help import help_text
from rltrain.run.program import ESTIMATE_FLAGS

# Maximum seconds for Python and packages to exit after the run.
_LEAVE_S = 60
_left: list[int] = []  # contains the exit code after the run
# Hydra's flags, which verl users may type: flags for files, and others -> replacement.
_NAMING = (("--config-path", "-cp"), ("--config-name", "-cn"), ("--config-dir", "-cd"))
_HYDRA = {
    ("--cfg", "-c"): "--print-config prints the configuration",
    ("--multirun", "-m"): "start one run for each setting, in a loop of your shell",
}
# Removed flags -> the replacement.
_REMOVED = {
    "--from": "--from was removed: give --config RUN/config.yaml --lengths RUN",
    "--sweep": "--sweep was removed: type one command for each combination",
    "--best": "--best was removed together with --sweep",
}


def main(argv: list[str] | None = None, program: Callable[[argparse.Namespace, Stop], int] | None = None) -> int:
    """Run the command and return its exit code; see errors.py. program: another program with the same arguments."""
    lenient_output()
    code = _main(argv, program or _run)
    report_to_supervisor(ended=code)
    # The module is looked up, not imported: if it is not loaded there is no tracker, and --help must not load it.
    tracking, watchdog = map(sys.modules.get, ("rltrain.run.report.tracking", "rltrain.runtime.ray_watchdog"))
    # At exit, the package of a hanging tracker could wait forever, and Ray would wait for a cluster that is gone or
    # hangs, and report that as a failure.
    _flush()
    if (tracking and tracking.hanging()) or (watchdog and (watchdog.lost() or watchdog.hanging())):
        os._exit(code)
    return code


def leave(code: int) -> NoReturn:
    """End this process, even if a thread of a callback or tracker never ends.

    Exit handlers of packages run. Modules are not torn down, because that takes more than a second, and a remaining
    library thread may crash during it, which would look like a killed run.
    """
    _left.append(code)
    late = threading.Timer(_LEAVE_S, os._exit, [code])
    late.daemon = True
    late.start()
    sys.exit(code)


def _end() -> None:
    if _left:
        _flush()
        os._exit(_left[0])


def _flush() -> None:
    """Flush the output streams. Discard output to a closed terminal or pipe, which would change Python's exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _main(argv: list[str] | None, program: Callable[[argparse.Namespace, Stop], int]) -> int:
    with listen() as stop:
        # From here on a signal to this process saves and ends the run.
        report_to_supervisor(pid=os.getpid())
        try:
            return program(_parse(sys.argv[1:] if argv is None else argv), stop)
        except BaseException as error:
            # Ray replaces the exception of a signal handler by another error.
            raised = stop.interrupted() if stop.at_once else system_error(error) or error
            if not isinstance(raised, RltrainError):
                report_to_supervisor(error=masked_text(f"{type(raised).__name__}: {raised}"))
                raise
        report_to_supervisor(error=str(raised), passing=raised.passing)
        # Flush the run's output first, so that it precedes the error if both go to the same file.
        _flush()
        with suppress(OSError):
            sys.stderr.write(_message(raised))
        return raised.exit_code


def _message(error: RltrainError) -> str:
    """Return the terminal output for an error. A stopped run is not an error."""
    first = "" if isinstance(error, Interrupted) else "error: "
    return first + "\n       ".join(str(error).splitlines()) + "\n"


def _run(arguments: argparse.Namespace, stop: Stop) -> int:
    if arguments.help is not None:
        # Several words may follow, as in --help learning rate.
        _write(help_text(" ".join([arguments.help, *(arguments.overrides if arguments.help else ())])))
        return 0
    if arguments.version:
        from rltrain.tools.env import short_facts

        _write(short_facts() + "\n")
        return 0
    if arguments.dry_run and not arguments.print_config:
        return dry_run(arguments)
    # Import here, so that --help and --version need not wait for it.
    from rltrain.api import check_settings, run
    from rltrain.config.load import load_config, to_yaml

    given = [f"--{name}" for name in ESTIMATE_FLAGS if getattr(arguments, name) is not None]
    arguments.problems += [f"{flag} is a flag of --dry-run. Add --dry-run, or leave it out." for flag in given]
    loaded = load_config(arguments.overrides, arguments.config, arguments.problems)
    if arguments.print_config:
        _write(to_yaml(loaded.config))
        return 0
    run(loaded, check_settings(loaded), stop)
    return 0


def dry_run(arguments: argparse.Namespace) -> int:
    """Print the dry run, or with a flag such as --device the estimate for these devices. Return the exit code."""
    if any(getattr(arguments, name) is not None for name in ESTIMATE_FLAGS):
        from rltrain.run.estimate import estimate

        text, refused = estimate(arguments)
    else:
        from rltrain.api import check_settings
        from rltrain.config.load import load_config
        from rltrain.run.dry_run import dry_run as describe

        loaded = load_config(arguments.overrides, arguments.config, arguments.problems)
        text, refused = describe(loaded, check_settings(loaded))
    _write(text)
    return ConfigError.exit_code if refused else 0


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as head has closed the pipe; nothing must be written at exit either
        _flush()


def _meant(flag: str) -> str:
    """Return a hint for a setting that was typed as a flag: settings have no dashes."""
    key, _, value = flag.lstrip("-").partition("=")
    return f" A setting is typed {key}={value or 'VALUE'}." if "." in key or "_" in key or value else ""


def _parse(argv: list[str]) -> argparse.Namespace:
    """Return the flags, with the remaining arguments as ``overrides`` and errors as ``problems``.

    Problems are returned so that they are reported together with problems of the settings.
    """
    # --help is defined here, because it takes the name of a section. Abbreviations are off, because a mistyped flag
    # could match another flag.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="SECTION")
    parser.add_argument("--config", action="append", default=[], metavar="FILE")
    for flag in ("--version", "--print-config", "--dry-run"):
        parser.add_argument(flag, action="store_true")
    for name in ESTIMATE_FLAGS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--multirun", "-m", action="store_const", const="")
    parser.add_argument("--cfg", "-c", nargs="?", const="")
    for flag in _REMOVED:
        parser.add_argument(flag, nargs="?", const="")
    for flags in _NAMING:
        parser.add_argument(*flags, metavar="NAME")
    try:
        arguments, words = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. See --help.") from None
    arguments.problems = [
        f"{flags[0]} is Hydra's, which is not used here: {instead}."
        for flags, instead in _HYDRA.items()
        if getattr(arguments, flags[0].lstrip("-").replace("-", "_")) is not None
    ]
    arguments.problems += [
        f"{sentence}." for flag, sentence in _REMOVED.items() if getattr(arguments, flag.lstrip("-")) is not None
    ]
    arguments.problems += [
        f"unknown flag {word}.{_meant(word)} Flags: --help, --version, --print-config, --dry-run (with --device, "
        "--nodes, --lengths, --assume), --config FILE; settings are key=value."
        for word in words
        if word.startswith("-")
    ]
    # Bytes that the locale's encoding cannot decode become lone surrogates.
    arguments.problems += [
        f"{sanitize(word)}: the marks in it are bytes that are no text in the encoding of this locale "
        f"({sys.getfilesystemencoding()}). Write it in that, or set PYTHONUTF8=1 where it is UTF-8."
        for word in words
        if replace_surrogates(word) != word
    ]
    arguments.overrides = [word for word in words if not word.startswith("-") and replace_surrogates(word) == word]
    if arguments.config_path or arguments.config_name or arguments.config_dir:
        # Import here, so that --help and --version need not wait for it.
        from rltrain.config.verl.defaults import chosen_settings
        from rltrain.config.verl.hydra import named

        try:
            tree = named(arguments.config_path, arguments.config_name, arguments.config_dir)
            arguments.config.insert(0, chosen_settings(tree))
        except ConfigError as error:
            arguments.problems.append(str(error))
    return arguments


if __name__ == "__main__":
    atexit.register(_end)  # before packages register their handlers, because the first one is called last
    leave(main())
