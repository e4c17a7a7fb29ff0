"""What the programs around a run share that take the keys and flags of training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from rltrain.base.errors import ConfigError
from rltrain.base.stop import Stop

Program = Callable[[argparse.Namespace, Stop], int]


def explained(usage: str, program: Program) -> Program:
    """``program`` with ``--help``, and a refusal of the flags that training alone has."""

    def explained_program(arguments: argparse.Namespace, stop: Stop) -> int:
        if arguments.help is not None:
            sys.stdout.write(usage)
            return 0
        for flag in ("print_config", "version"):
            if getattr(arguments, flag):
                raise ConfigError(f"--{flag.replace('_', '-')} is a flag of rltrain train. Leave it out.")
        return program(arguments, stop)

    return explained_program
