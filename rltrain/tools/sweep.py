"""``python -m rltrain.sweep key=a,b other=value ...``: a run for every combination, one after the other.

A failed run must not end a sweep, and an interrupted sweep must not start over. So all settings are checked before the
first run; each run has a separate folder, named by the swept values, in which it resumes like any run; sweep.json lists
the finished runs. All runs use this process and one Ray. Runs are not concurrent, because a run uses all devices, and
results do not determine the next settings. Slow imports are inside functions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.api import check_settings, train
from rltrain.common import logs
from rltrain.common.errors import ConfigError, Interrupted, RltrainError, first_line, system_error
from rltrain.common.stop import Stop
from rltrain.common.storage import read_json, write_json
from rltrain.config.load import load_config
from rltrain.config.loaded import LoadedConfig
from rltrain.main_ppo import main as guarded
from rltrain.run.program import explained

_USAGE = """usage: rltrain sweep [--out FOLDER] [--dry-run] [--config FILE] key=a,b key=value ...

Make a run for every combination of values, one after the other.

  key=a,b        a run with each; several such keys make all combinations. A comma in brackets or quotes makes no list.
  --out FOLDER   where the runs' folders, sweep.json and the comparison are (default: trainer.default_local_dir)
  --dry-run      list the runs and say of each whether it would start

The same command resumes: it skips finished runs, and the others continue from their checkpoints.
Exit code 0: all runs are finished; else that of the failures, or 1 where they differ; 130 or 75: stopped by a signal.
"""
_FOLDER, _EXPERIMENT = "trainer.default_local_dir", "trainer.experiment_name"
_LENGTH = ("trainer.total_training_steps", "trainer.total_epochs")
# A run's name is used for its folder and by trackers. If two names are equal, the second gets a number.
_NO_NAME, _LONGEST = re.compile(r"[^\w.+=-]+"), 120
_FINISHED, _FAILED, _STOPPED = "finished", "failed", "stopped"


@dataclass(frozen=True, eq=False)
class SweepRun:
    """One combination."""

    name: str
    loaded: LoadedConfig
    notes: list[str]
    """Notes on the settings, for a dry run."""

    @property
    def folder(self) -> Path:
        return Path(self.loaded.config.trainer.default_local_dir).expanduser().resolve()


def values_of(text: str) -> list[str]:
    """Split a list of values: ``1,2`` are two, ``[1,2]``, ``"1,2"`` and ``{a: 1, b: 2}`` are one."""
    values, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"" and (depth or not values[-1].strip()):  # any other quotation mark is an apostrophe
            quote = sign
        elif sign == "," and not depth:
            values.append("")
            continue
        depth += 0 if quote else (sign in "([{") - (sign in ")]}")
        values[-1] += sign
    return values


def combinations(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return a name and the words of every run. Raises ConfigError if nothing is swept, or a value is empty."""
    # As in a run, the last argument for a key takes precedence.
    given = {key: values_of(text) for key, _, text in (word.partition("=") for word in words)}
    swept = {key: values for key, values in given.items() if len(values) > 1}
    for key, values in swept.items():
        if not all(value.strip() for value in values):
            raise ConfigError(f"{key}={','.join(values)}: a value of the list is empty. Quote a text with commas.")
    if not swept:
        raise ConfigError("nothing is swept: give a key several values, such as data.seed=1,2,3.")
    if _FOLDER in swept:
        raise ConfigError(
            f"{_FOLDER}={','.join(swept[_FOLDER])}: every run gets its own folder. To choose it, use --out."
        )
    fixed = [word for word in words if word.partition("=")[0] not in swept]
    ends = [key.rpartition(".")[2] for key in swept]
    shown = [end if ends.count(end) == 1 else key for key, end in zip(swept, ends, strict=True)]
    runs: dict[str, list[str]] = {}
    for choice in itertools.product(*swept.values()):
        text = "_".join(f"{key}={value}" for key, value in zip(shown, choice, strict=True))
        name = first = _NO_NAME.sub("-", text).strip("-")[:_LONGEST]
        for number in itertools.count(2):
            if name not in runs:
                break
            name = f"{first}_{number}"
        runs[name] = [*fixed, *(f"{key}={value}" for key, value in zip(swept, choice, strict=True))]
    return list(runs.items())


def load_runs(arguments: argparse.Namespace, out: Path | None) -> tuple[list[SweepRun], Path]:
    """Return all runs and their common folder. Raises ConfigError with the problems of all runs."""
    runs, problems, combined = list[SweepRun](), dict[str, list[str]](), combinations(arguments.overrides)
    for name, words in combined:
        try:
            plain = load_config(words, arguments.config, arguments.problems).config.trainer
            # The common folder is the default folder of the first run, because the default may depend on a swept key.
            out = out or Path(plain.default_local_dir).expanduser()
            own = [f"{_FOLDER}={out / name}", f"{_EXPERIMENT}={plain.experiment_name}-{name}"]
            loaded = load_config([*words, *own], arguments.config)
            runs.append(SweepRun(name, loaded, check_settings(loaded)))
        except ConfigError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(name)
    if problems:
        lines = [line if len(of) == len(combined) else f"{', '.join(of)}: {line}" for line, of in problems.items()]
        raise ConfigError("\n".join(lines))
    assert out
    if len({json.dumps(run.loaded.config.ray_kwargs.ray_init, default=str, sort_keys=True) for run in runs}) > 1:
        raise ConfigError("ray_kwargs has several values, but all runs of a sweep use one Ray cluster.")
    return runs, out


def sweep(runs: Sequence[SweepRun], out: Path, stop: Stop) -> int:
    """Run all unfinished runs, and compare the finished ones. Return the exit code."""
    from rltrain.run.build import begin_ray
    from rltrain.runtime.ray_watchdog import lost
    from rltrain.tools.compare import compare

    file = out / "sweep.json"
    record: dict[str, dict[str, Any]] = read_json(file) or {}
    finished = [run for run in runs if _is_finished(run, record.get(run.name, {}))]
    for run in finished:
        _print(f"{run.name}: finished before, in {run.folder}")
    left, codes, messages = [run for run in runs if run not in finished], set[int](), dict[str, str]()
    with ExitStack() as closing:
        if left:
            largest = max((run.loaded.config for run in left), key=lambda config: config.trainer.n_gpus_per_node)
            with logs.session():
                begin_ray(largest, stop, closing)
        for number, run in enumerate(left, 1):
            _print(f"{run.name}: run {number} of {len(left)}, in {run.folder}")
            state, message, code = _make(run)
            record[run.name] = {"state": state, "folder": str(run.folder), "message": message}
            write_json(file, record)
            if state == _FINISHED:
                finished.append(run)
            else:
                sys.stderr.write(f"{run.name}: {message}\n")
                messages[run.name] = message.splitlines()[0]
                # The exit code of a signal takes precedence, because it is the reason for missing runs.
                codes = {code} if state == _STOPPED else codes | {code}
            # A signal ends all runs, and without Ray no run can start.
            if state == _STOPPED or lost():
                break
    if len(finished) > 1:
        try:
            compare([run.folder for run in runs if run in finished], out)
        except RltrainError as error:  # the runs themselves have finished
            sys.stderr.write(f"the runs are not compared: {error}\n")
    _print(f"{len(finished)} of {len(runs)} runs are finished")
    for run in [run for run in left if run not in finished]:
        _print(f"  {run.name}: {messages.get(run.name, 'not started')}")
    return codes.pop() if len(codes) == 1 else int(bool(codes))


def _is_finished(run: SweepRun, entry: Mapping[str, Any]) -> bool:
    """Return whether ``entry`` of sweep.json shows that the run is finished with the same length.

    Raises ConfigError for a finished run with other settings.
    """
    from rltrain.run.changes import changed_settings

    if entry.get("state") != _FINISHED or not run.folder.is_dir():
        return False
    changes = {key: f"{key}: {then} -> {now}" for key, then, now in changed_settings(run.folder, run.loaded)}
    if others := [text for key, text in changes.items() if not key.startswith("trainer.")]:
        raise ConfigError(
            f"{run.folder} is a finished run of this sweep with different settings ({'; '.join(others)}). Use another "
            "--out, or the earlier settings."
        )
    return not changes.keys() & set(_LENGTH)


def _make(run: SweepRun) -> tuple[str, str, int]:
    """Return state, message and exit code of a run."""
    try:
        code = train(run.loaded).exit_code
    except Interrupted:
        raise
    except Exception as failure:  # noqa: BLE001 - a failure ends only its run
        error = failure if isinstance(failure, RltrainError) else system_error(failure)
        text = str(error) if error else f"{type(failure).__name__}: {first_line(failure)}"
        return _FAILED, f"error: {text}", error.exit_code if error else 1
    return (_FINISHED, "", 0) if not code else (_STOPPED, "stopped by a signal; the same command resumes", code)


def _dry_run(runs: Sequence[SweepRun]) -> int:
    from rltrain.run.dry_run import dry_run

    any_refused = False
    for run in runs:
        text, refused = dry_run(run.loaded, run.notes)
        any_refused |= refused
        _print(f"{run.name}: {'would be refused' if refused else 'would start'}, in {run.folder}")
        if refused:
            sys.stdout.write("  " + text.rstrip().replace("\n", "\n  ") + "\n")
    return ConfigError.exit_code if any_refused else 0


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path)
    own, words = parser.parse_known_args(argv)

    def program(arguments: argparse.Namespace, stop: Stop) -> int:
        runs, out = load_runs(arguments, own.out)
        return _dry_run(runs) if arguments.dry_run else sweep(runs, out, stop)

    return guarded(words, explained(_USAGE, program))


if __name__ == "__main__":
    sys.exit(main())
