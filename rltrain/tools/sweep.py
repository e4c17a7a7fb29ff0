"""``python -m rltrain.sweep key=a,b other=value ...``: a run for every combination, one after the other.

Problem: a night of runs must not end with the first that fails, nor begin anew when it is cut short. Choice: all
settings are checked before the first run; each run has a folder of its own, named by what is swept, in which it resumes
as every run does; sweep.json says which are finished. All are made in this process on one Ray. Left out: several at a
time, as a run has all the devices, and choosing the next settings by results.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rltrain.api import look_over, train
from rltrain.base import logs
from rltrain.base.errors import ConfigError, Interrupted, RltrainError, first_line, plain, system_error
from rltrain.base.program import explained
from rltrain.base.stop import Stop
from rltrain.base.storage import read_json, write_json
from rltrain.config.load import load_config, to_dict
from rltrain.config.loaded import LoadedConfig
from rltrain.config.schema import Config
from rltrain.controller.cluster import cluster_address, start_ray
from rltrain.controller.lifeline import ended_after_us, lost, stop_ray, unless_lost
from rltrain.data.files import files_of
from rltrain.main_ppo import main as guarded
from rltrain.models.files.digest import digest_of_files, digest_of_model, digests_of_values
from rltrain.tools.compare import compare
from rltrain.tools.evaluate.models import flat

_USAGE = """usage: python -m rltrain.sweep [--out FOLDER] [--dry-run] [--config FILE] key=a,b key=value ...

{0}

  key=a,b        a run with each; several such keys make all combinations. A comma in brackets or quotes makes no list.
  --out FOLDER   where the runs' folders, sweep.json and the comparison are (default: trainer.default_local_dir)
  --dry-run      list the runs and say of each whether it would start

The same command goes on: it skips runs that are finished, and the others go on from their checkpoints.
Exit code 0: all runs are finished; else that of the failures, or 1 where they differ; 130 or 75: stopped by a signal.
"""
_FOLDER = "trainer.default_local_dir"
_EXPERIMENT = "trainer.experiment_name"
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""
# What is left of a name, so that it is a folder and a name for trackers; a longer one gets a number instead of its end.
_NO_NAME, _LONGEST = re.compile(r"[^\w.+=-]+"), 120
_FINISHED, _FAILED, _STOPPED = "finished", "failed", "stopped"


@dataclass(frozen=True)
class SweepRun:
    """One combination."""

    name: str
    loaded: LoadedConfig
    notes: list[str]
    """What is said of the settings."""

    @property
    def folder(self) -> Path:
        return Path(self.loaded.config.trainer.default_local_dir).expanduser().resolve()

    @cached_property
    def digest(self) -> str:
        """Of the settings and of the files that they name: a run that has finished with others is not skipped."""
        return _digest(self.loaded.config)

    @cached_property
    def kind(self) -> str:
        """A digest of the settings but for those of its length: a run that has finished may go on to more steps."""
        trainer = replace(self.loaded.config.trainer, total_training_steps=None, total_epochs=1)
        return _digest(replace(self.loaded.config, trainer=trainer))


def _digest(config: Config) -> str:
    values = flat(to_dict(config))
    contents = digests_of_values(values)
    data = [config.data.train_files, config.data.val_files or []]
    names = [name for given in data for name in ([given] if isinstance(given, str) else given)]
    contents["data"] = _digest_of_data(tuple(names))
    models = [str(value) for key, value in values.items() if key.endswith("model.path") and value]
    contents |= {model: digest_of_model(Path(model)) for model in models if Path(model).is_dir()}
    return hashlib.sha256(json.dumps([values, contents], sort_keys=True).encode()).hexdigest()


@functools.cache  # the runs of a sweep mostly read the same
def _digest_of_data(names: tuple[str, ...]) -> str:
    return digest_of_files(file for name in names for file in files_of(name))


def values_of(text: str) -> list[str]:
    """The values of a list: ``1,2`` are two, ``[1,2]``, ``"1,2"`` and ``{a: 1, b: 2}`` are one."""
    values, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in _QUOTES and (depth or not values[-1].strip()):  # elsewhere it is an apostrophe
            quote = sign
        elif sign in _OPENING:
            depth += 1
        elif sign in _CLOSING:
            depth -= 1
        elif sign == "," and not depth:
            values.append("")
            continue
        values[-1] += sign
    return values


def combinations(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """A name and the words of every run. Raises ConfigError where nothing is swept, or a value is empty."""
    swept: dict[str, list[str]] = {}
    fixed = list[str]()
    for word in words:
        key, _, text = word.partition("=")
        values = values_of(text)
        # A key that is said again takes the earlier value back, as in a run.
        swept.pop(key, None)
        if len(values) < 2:
            fixed.append(word)
            continue
        if not all(value.strip() for value in values):
            raise ConfigError(f"{word}: a value of the list is empty. Put a text with commas in quotes.")
        swept[key] = values
        fixed = [other for other in fixed if other.partition("=")[0] != key]
    if not swept:
        raise ConfigError("nothing is swept: give a key several values, such as data.seed=1,2,3.")
    if _FOLDER in swept:
        raise ConfigError(f"{_FOLDER}={','.join(swept[_FOLDER])}: every run gets a folder of its own; use --out.")
    runs, names = [], set[str]()
    for choice in itertools.product(*swept.values()):
        name = _name(dict(zip(swept, choice, strict=True)), names)
        names.add(name)
        runs.append((name, [*fixed, *(f"{key}={value}" for key, value in zip(swept, choice, strict=True))]))
    return runs


def _name(settings: dict[str, str], taken: set[str]) -> str:
    """lr=1e-6_seed=1: the ends of the keys that tell them apart."""
    ends = [key.rpartition(".")[2] for key in settings]
    shown = {key: end if ends.count(end) == 1 else key for key, end in zip(settings, ends, strict=True)}
    name = "_".join(f"{shown[key]}={value}" for key, value in settings.items())
    name = _NO_NAME.sub("-", name).strip("-")[:_LONGEST]
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(free for free in names if free not in taken)


def load_runs(arguments: argparse.Namespace, out: Path | None) -> tuple[list[SweepRun], Path]:
    """All runs and the folder around theirs. Raises ConfigError with what is wrong with any of them."""
    runs, problems, combined = list[SweepRun](), dict[str, list[str]](), combinations(arguments.overrides)
    for name, words in combined:
        try:
            plain = load_config(words, arguments.config, arguments.problems).config.trainer
            # That of the first: a key of a sweep may be part of the default.
            out = out or Path(plain.default_local_dir).expanduser()
            own = [f"{_FOLDER}={out / name}", f"{_EXPERIMENT}={plain.experiment_name}-{name}"]
            loaded = load_config([*words, *own], arguments.config)
            runs.append(SweepRun(name, loaded, look_over(loaded)))
        except ConfigError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(name)
    if problems:
        lines = [line if len(of) == len(combined) else f"{', '.join(of)}: {line}" for line, of in problems.items()]
        raise ConfigError("\n".join(lines))
    assert out
    if len({json.dumps(run.loaded.config.ray_kwargs.ray_init, default=str, sort_keys=True) for run in runs}) > 1:
        raise ConfigError("ray_kwargs has several values: all runs of a sweep are made on one Ray.")
    return runs, out


class Record:
    """sweep.json: what has become of every run."""

    def __init__(self, out: Path) -> None:
        self._file = out / "sweep.json"
        self.runs: dict[str, dict[str, Any]] = read_json(self._file) or {}

    def is_finished(self, run: SweepRun) -> bool:
        """Whether it has, with these settings, and its folder is still there."""
        entry = self.runs.get(run.name, {})
        return entry.get("state") == _FINISHED and entry.get("settings") == run.digest and run.folder.is_dir()

    def is_of_others(self, run: SweepRun) -> bool:
        """Whether the run of this name was finished with settings of another kind, and its folder is still there."""
        entry = self.runs.get(run.name, {})
        return entry.get("state") == _FINISHED and entry.get("kind") != run.kind and run.folder.is_dir()

    def set(self, run: SweepRun, state: str, message: str = "") -> None:
        """Keep what became of a run. Raises DiskError."""
        digests = {"settings": run.digest, "kind": run.kind}
        self.runs[run.name] = {"state": state, **digests, "folder": str(run.folder), "message": message}
        write_json(self._file, self.runs)


def sweep(runs: Sequence[SweepRun], out: Path, stop: Stop) -> int:
    """Make all runs that are not finished. Returns the exit code."""
    record, codes = Record(out), dict[str, int]()
    for run in runs:
        if record.is_of_others(run):
            raise ConfigError(
                f"{run.folder} is a finished run of this sweep with other settings, which would count as this one's. "
                "Use another --out, or the settings of before."
            )
    left = [run for run in runs if not record.is_finished(run)]
    for run in runs:
        if run not in left:
            _say(f"{run.name}: finished before, in {run.folder}")
    with ExitStack() as closing:
        if left:
            _start_ray(left, stop, closing)
        for number, run in enumerate(left, 1):
            _say(f"{run.name}: run {number} of {len(left)}, in {run.folder}")
            state, message, code = _make(run)
            record.set(run, state, message)
            codes[run.name] = code
            if message:
                sys.stderr.write(plain(f"{run.name}: {message}\n"))
            # Whoever stops a run means all of them, and on a Ray that is gone none begins.
            if state == _STOPPED or lost():
                break
    return _end(runs, out, record, codes)


def _make(run: SweepRun) -> tuple[str, str, int]:
    """State, message and exit code of a run."""
    try:
        code = train(run.loaded).exit_code
    except Interrupted:
        raise
    except Exception as failure:  # noqa: BLE001 - whatever ends one run, the others are still to be made
        error = failure if isinstance(failure, RltrainError) else system_error(failure)
        text = str(error) if error else f"{type(failure).__name__}: {first_line(failure)}"
        return _FAILED, f"error: {text}", error.exit_code if error else 1
    return (_FINISHED, "", 0) if not code else (_STOPPED, "stopped by a signal; the same command goes on", code)


def _start_ray(runs: Sequence[SweepRun], stop: Stop, closing: ExitStack) -> None:
    """One Ray for all of them, with room for the largest."""
    largest = max((run.loaded.config for run in runs), key=lambda config: config.trainer.n_gpus_per_node)
    with logs.session(), logs.waiting("starting Ray"), stop.keeping_handlers("starting Ray"):
        if start_ray(largest):
            closing.enter_context(ended_after_us(not cluster_address(largest)))
            closing.callback(unless_lost(stop_ray))


def _end(runs: Sequence[SweepRun], out: Path, record: Record, codes: dict[str, int]) -> int:
    """Say what became of the runs and compare those that are finished; returns the exit code."""
    finished = [run for run in runs if record.is_finished(run)]
    if len(finished) > 1:
        try:
            compare([run.folder for run in finished], out)
        except RltrainError as error:  # the runs are made all the same
            sys.stderr.write(plain(f"the runs are not compared: {error}\n"))
    _say(f"{len(finished)} of {len(runs)} runs are finished")
    for run in runs:
        if run not in finished:
            made = run.name in codes
            _say(f"  {run.name}: {record.runs[run.name]['message'].splitlines()[0] if made else 'not begun'}")
    failures = {code for code in codes.values() if code}
    if not failures:
        return 0
    # A signal decides: it is why the others were not made.
    stopped = [code for name, code in codes.items() if record.runs[name]["state"] == _STOPPED]
    return stopped[0] if stopped else failures.pop() if len(failures) == 1 else 1


def _dry_run(runs: Sequence[SweepRun]) -> int:
    from rltrain.run.dry_run import dry_run

    any_refused = False
    for run in runs:
        text, refused = dry_run(run.loaded, run.notes)
        any_refused |= refused
        _say(f"{run.name}: {'would be refused' if refused else 'would start'}, in {run.folder}")
        if refused:
            sys.stdout.write("  " + text.rstrip().replace("\n", "\n  ") + "\n")
    return ConfigError.exit_code if any_refused else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path)
    own, words = parser.parse_known_args(argv)

    def program(arguments: argparse.Namespace, stop: Stop) -> int:
        runs, out = load_runs(arguments, own.out)
        return _dry_run(runs) if arguments.dry_run else sweep(runs, out, stop)

    usage = _USAGE.format(str(__doc__).splitlines()[0].partition(": ")[2])
    return guarded(words, explained(usage, program))


if __name__ == "__main__":
    sys.exit(main())
