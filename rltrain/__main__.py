"""``rltrain COMMAND ...``, the same as ``python -m rltrain COMMAND ...`` and ``python -m rltrain.COMMAND ...``."""

from __future__ import annotations

import difflib
import importlib
import sys

from rltrain.commands import COMMANDS, REMOVED, converters
from rltrain.common.errors import lenient_output

# Commands of other programs.
_MEANT = {name: f"train algorithm.adv_estimator={name}" for name in ("grpo", "gae", "rloo")}
_MEANT |= {"ppo": "train", "export": "checkpoint export", "init": "train --print-config", "run": "train"}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    lenient_output()
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help") or words == ["help"]:
        sys.stdout.write(_usage())
        return 0
    helps = words[0] == "help"
    words = words[helps:]
    if words[0] in ("--version", "version"):
        words = ["train", "--version"]
    # Two words are tried first, so that `rewards try` is not parsed as a command `rewards`.
    two = " ".join(words[:2])
    command, rest = (two, words[2:]) if two in COMMANDS else (words[0], words[1:])
    if helps:  # for a converter the name precedes --help
        rest = [*rest, "--help"] if command == "data" else ["--help", *rest]
    if command in REMOVED:
        sys.stderr.write(f"error: {REMOVED[command]}\n")
        return 2
    if command == "data" and rest and rest[0] in converters():
        command = f"data {rest.pop(0)}"
        module = f"rltrain.data_preprocess.{command.removeprefix('data ')}"
    elif command == "data" and rest and rest[0] in ("-h", "--help"):
        sys.stdout.write(
            f"usage: rltrain data CONVERTER ...\n\nMake data files. Converters: {', '.join(converters())}.\n"
        )
        return 0
    elif command == "data":
        sys.stderr.write(f"error: rltrain data needs the name of a converter: {', '.join(converters())}.\n")
        return 2
    elif command in COMMANDS:
        module = COMMANDS[command][0]
    else:
        meant = _MEANT.get(command)
        near = [meant] if meant else difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.75)
        hint = f" Did you mean rltrain {near[0]}?" if near else ""
        hint = f" Did you mean rltrain train {command} …?" if "=" in command else hint
        typed = two if any(name.startswith(f"{command} ") for name in COMMANDS) else command
        sys.stderr.write(f"error: there is no command '{typed}'.{hint} See rltrain --help.\n")
        return 2
    # argparse takes the program name in its usage text from here.
    sys.argv = [f"rltrain {command}", *rest]
    return importlib.import_module(module).main(rest)


def _usage() -> str:
    lines = [f"  {name:<12} {text}\n" for name, (_, text) in COMMANDS.items()]
    lines.append(f"  {'data':<12} make a data file (rltrain data gsm8k --help)\n")
    what = "usage: rltrain COMMAND ...\n\nTrain language and vision-language models with PPO, GRPO and others.\n\n"
    return (
        what + "".join(lines) + "\nrltrain help COMMAND explains one. Each is also a module: python -m rltrain.view …\n"
    )


if __name__ == "__main__":
    sys.exit(main())
