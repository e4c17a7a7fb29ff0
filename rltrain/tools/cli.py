"""``rltrain COMMAND ...``: one door to the programs, each of which is also ``python -m MODULE ...``."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys

from rltrain import data_preprocess
from rltrain.base.errors import lenient_output

COMMANDS = {
    "train": ("rltrain.main_ppo", "train a model (rltrain train --help: its keys)"),
    "supervise": ("rltrain.controller.launch.supervise", "run a command again when that may help: -- COMMAND ..."),
    "doctor": ("rltrain.tools.doctor", "would this cluster train? (the keys of training)"),
    "port": ("rltrain.tools.port.__main__", "a launch script or saved configuration of verl's, as a script of ours"),
    "evaluate": ("rltrain.tools.evaluate.__main__", "what a model is worth on data, with intervals: model=… data=…"),
    "resolution": (
        "rltrain.tools.resolution.__main__",
        "the bounds of pixels at which a model answers best: model=… dev=… test=…",
    ),
    "report": ("rltrain.run.report.table", "the phase table of a run"),
    "watch": ("rltrain.tools.watch", "a run that goes on elsewhere, by its folder"),
    "compare": ("rltrain.tools.compare.__main__", "runs beside each other: curves, differences, settings, weights"),
    "simulate": ("rltrain.tools.simulate", "seconds of a step on another device: key=value … --device H100"),
    "sweep": ("rltrain.tools.sweep", "a run for every combination of settings, one after the other: key=a,b ..."),
    "view": ("rltrain.run.report.view", "the answers of a run"),
    "average": ("rltrain.tools.average", "one model whose weights are the mean of those of others"),
    "checkpoint": ("rltrain.tools.checkpoint", "export, thin or verify the checkpoints of a run"),
    "serve": ("rltrain.tools.serve.__main__", "an OpenAI-compatible server of a model, for evaluations"),
    "sync": ("rltrain.tools.sync", "send what trackers have kept offline in a run"),
    "lint": ("rltrain.data_preprocess.lint", "check data files before a run does"),
    "rewards try": ("rltrain.tools.try_reward", "try a reward function on rows and answers"),
    "agents try": ("rltrain.tools.try_agent", "try tools, an environment or an agent on a row, turn by turn"),
    "replay": ("rltrain.tools.replay", "an incident with a loss that is not finite, once more on one device"),
    "collect": ("rltrain.tools.collect", "what a bug report needs of a run, in one file"),
    "env": ("rltrain.run.report.env_report", "versions, machine and devices, for a bug report"),
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the command."""
    lenient_output()
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0
    if words[0] == "--version":
        words = ["train", "--version"]
    # Two words first, so that `rewards try` is not taken for a command `rewards`.
    two = " ".join(words[:2])
    command, rest = (two, words[2:]) if two in COMMANDS else (words[0], words[1:])
    if command == "data" and rest and rest[0] in _converters():
        module = f"{data_preprocess.__name__}.{rest.pop(0)}"
    elif command == "data":
        sys.stderr.write(f"error: rltrain data needs the name of a converter: {', '.join(_converters())}.\n")
        return 2
    elif command in COMMANDS:
        module = COMMANDS[command][0]
    else:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f" Did you mean rltrain {near[0]}?" if near else ""
        hint = f" Did you mean rltrain train {command} …?" if "=" in command else hint
        typed = two if any(name.startswith(f"{command} ") for name in COMMANDS) else command
        sys.stderr.write(f"error: there is no command '{typed}'.{hint} See rltrain --help.\n")
        return 2
    # argparse takes the name in its usage from here.
    sys.argv = [f"rltrain {command}", *rest]
    return importlib.import_module(module).main(rest)


def _converters() -> list[str]:
    helpers = {"benchmark", "common", "sources", "lint"}
    return [module.name for module in pkgutil.iter_modules(data_preprocess.__path__) if module.name not in helpers]


def _usage() -> str:
    lines = [f"  {name:<12} {text}\n" for name, (_, text) in COMMANDS.items()]
    lines.append(f"  {'data':<12} make a data file (rltrain data gsm8k --help)\n")
    return (
        "usage: rltrain COMMAND ...\n\n" + "".join(lines) + "\nEach is also a module: python -m rltrain.main_ppo ...\n"
    )


if __name__ == "__main__":
    sys.exit(main())
