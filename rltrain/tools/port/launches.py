"""Detection of the commands in a script that start a verl run, and of their settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rltrain.common.errors import ConfigError
from rltrain.config.verl.defaults import chosen_settings
from rltrain.config.verl.hydra import named
from rltrain.config.verl.other_trainers import refusal, trainer_of
from rltrain.config.verl.table import rows
from rltrain.tools.port.shell import Call, inside_out
from rltrain.tools.port.translate import ASKED, typed

# Other Python programs by module or file name, each with its counterpart in rltrain.
_OTHERS = {
    r"sft": "supervised fine-tuning is not translated: rltrain sft takes keys of verl's SFT trainer",
    r"main_generation|main_eval": "to test a checkpoint: rltrain evaluate model=… data=…",
    r"data_preprocess[./]": "data files are made by rltrain data NAME (rltrain data --help)",
    r"model_merger": "a checkpoint's hf_model folder needs no merging here",
    r"trainer[./]main(?=\.py$|$)": "this is EasyR1's trainer: docs/from-easyr1.md translates its keys",
}
# Programs of other trainers.
_LAUNCHERS = {
    "OpenRLHF": r"openrlhf[./]cli", "TRL": r"^trl \w|\btrl[./]scripts",
    "ms-swift": r"^swift \w|\bswift[./]cli", "AReaL": r"\bareal[./]",
    "LLaMA-Factory": r"^llamafactory-cli|\bllamafactory[./]", "MindSpeed RL": r"\bcli/train_(grpo|ppo|dapo|dpo)\.py",
}  # fmt: skip
# Entry points that use the PPO trainer of verl, which rltrain replaces.
_SAME = re.compile(r"(.*/)?(verl/|verl\.)trainer[./]main_ppo(_sync)?(\.py)?|.*dapo[\w./]*main_dapo(\.py)?|main_ppo\.py")
_PYTHON = re.compile(r"python|torchrun|accelerate|deepspeed|uv$")
_KEY = re.compile(r"^\+{0,2}[A-Za-z_][\w@/]*(\.[\w@/-]+)*=")


@dataclass(frozen=True)
class Launch:
    """A launch of a trainer in a script."""

    entry: str
    """The module or file that was started."""
    settings: tuple[tuple[str, str], ...]
    """Keys and values as written; later ones take precedence."""
    lost: tuple[str, ...] = ()
    """Arguments that could not be read."""
    exported: tuple[tuple[str, str], ...] = ()
    """Variables that the script exported to it."""


def launches(calls: Sequence[Call], folders: Sequence[Path]) -> tuple[list[Launch], list[str]]:
    """Return the runs that the calls start, and notes on other calls of Python.

    folders: base folders of relative paths of configuration files.
    """
    runs: dict[tuple, Launch] = {}
    notes: dict[str, None] = {}
    for call in calls:
        entry, rest = _entry(call.words)
        if answer := _of_another_trainer(call.words, entry):
            notes[answer] = None
        if answer or not entry:
            continue
        reasons = (why for pattern, why in _OTHERS.items() if re.search(rf"({pattern})[^/.]*(\.py)?$", entry))
        reason = None if _SAME.fullmatch(entry) else next(reasons, None)
        if reason:
            notes[f"{entry}: {reason}"] = None
        elif any(_KEY.match(word) or word.startswith("--config") for word in rest):
            launch = _launch(entry, rest, call, folders)
            # A wrapper such as srun is recorded, and so is the command that it starts.
            runs.setdefault((entry, launch.settings), launch)
        else:
            notes[f"{' '.join(call.words[:4])}: not run, and no run of verl's"] = None
    return list(runs.values()), list(notes)


def _of_another_trainer(words: Sequence[str], entry: str) -> str:
    """Return the message for a launch of another trainer, by its program or its flags; "" for any other call."""
    if _SAME.fullmatch(entry):
        return ""
    flags = [word[2:].partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
    programs = f"{Path(words[0]).name} {' '.join(words[1:2])}", entry
    name = next(
        (name for name, pattern in _LAUNCHERS.items() if any(re.search(pattern, each) for each in programs)), ""
    )
    found = next(((row.key, row.to) for row in rows("trainer") if row.key == name), None) or trainer_of(flags)
    return refusal(*found, f"{entry or programs[0]}: this is a launch", flags) if found else ""


def _entry(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the module or file that a command starts, and the words after it."""
    for at, word in enumerate(words[:-1]):
        if word in ("-m", "--module") and any(_PYTHON.match(Path(before).name) for before in words[:at]):
            return words[at + 1], words[at + 2 :]
    for at, word in enumerate(words):
        if word.endswith(".py") and "=" not in word and at:
            return word, words[at + 1 :]
    return "", ()


def _launch(entry: str, words: Sequence[str], call: Call, folders: Sequence[Path]) -> Launch:
    flags, settings, lost = {"--config-path": "", "--config-name": ""}, list[tuple[str, str]](), list[str]()
    waiting = ""
    for word in words:
        name, equals, text = word.partition("=")
        name = {"-cp": "--config-path", "-cn": "--config-name"}.get(name, name)
        if waiting:
            flags[waiting], waiting = word, ""
        elif name in flags:
            flags[name], waiting = text, "" if equals else name
        elif _KEY.match(word):
            settings.append((name, text))
        elif word.strip():
            taken_out = "the key is removed from verl's configuration. Check that the new script does not set it"
            lost.append(f"{word}: {taken_out if word.startswith('~') else 'it is not of the form key=value'}")
    if any(flags.values()):
        read, problem = _named(flags["--config-path"], flags["--config-name"], folders)
        settings = [*read, *settings]
        lost += [problem] if problem else []
    if not _SAME.fullmatch(entry):
        lost.append(f"{entry} is not verl's main_ppo: anything that it adds to main_ppo is not carried over")
    return Launch(entry, tuple(settings), tuple(lost), tuple(call.exported.items()))


def _named(path: str, name: str, folders: Sequence[Path]) -> tuple[list[tuple[str, str]], str]:
    problem = ""
    for folder in folders:
        try:
            tree = named(str(folder / inside_out(path)) if path else None, name or None)
        except ConfigError as error:
            problem = problem or str(error)
        else:
            return [(key, typed(value)) for key, value in chosen_settings(tree, ASKED).items()], ""
    return [], problem
