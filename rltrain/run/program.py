"""Shared code of programs that take the keys and flags of training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from rltrain.common.errors import ConfigError, usage_text
from rltrain.common.stop import Stop

Program = Callable[[argparse.Namespace, Stop], int]


# Flags of --dry-run for estimates on other devices.
ESTIMATE_FLAGS = ("device", "nodes", "lengths", "assume")


def explained(usage: str, program: Program, *, estimates: bool = False) -> Program:
    """Return ``program`` with ``--help``, and with an error for flags that only training supports.

    estimates: the program takes `ESTIMATE_FLAGS`.
    """

    def explained_program(arguments: argparse.Namespace, stop: Stop) -> int:
        if arguments.help is not None:
            sys.stdout.write(usage_text(usage))
            return 0
        for flag in ("print_config", "version", *(() if estimates else ESTIMATE_FLAGS)):
            if getattr(arguments, flag) not in (None, False):
                raise ConfigError(f"--{flag.replace('_', '-')} is a flag of rltrain train. Remove it.")
        return program(arguments, stop)

    return explained_program
