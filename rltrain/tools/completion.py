"""``rltrain completion``: Print a script for bash and zsh that completes commands and keys.

Type "source <(rltrain completion)", or put this line into ~/.bashrc or ~/.zshrc. The script contains all words, because
starting Python at every tab would take a second. File names are completed as for other commands.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rltrain.commands import COMMANDS, converters
from rltrain.common.errors import command
from rltrain.config.schema.keys import all_keys

# zsh gets matches by compadd, bash from COMPREPLY. A key ends with = and no space.
_SCRIPT = Path(__file__).with_name("completion.sh")


@command
def main(argv: list[str] | None = None) -> int:
    """Print the script."""
    argparse.ArgumentParser("rltrain completion", description=str(__doc__).partition(": ")[2]).parse_args(argv)
    first = dict.fromkeys([*(name.split()[0] for name in COMMANDS), "data", "help", "version"])
    seconds = {"rewards": ["try"], "agents": ["try"], "checkpoint": ["export", "thin", "verify"], "data": converters(),
               "help": first}  # fmt: skip
    second = "\n".join(f'        "2 {name}") found="{" ".join(words)}" ;;' for name, words in seconds.items())
    keys = " ".join(f"{key}=" for key in all_keys())
    sys.stdout.write(_SCRIPT.read_text(encoding="utf-8").format(commands=" ".join(first), second=second, keys=keys))
    return 0


if __name__ == "__main__":
    sys.exit(main())
