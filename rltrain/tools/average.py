"""``python -m rltrain.average OUT MODEL MODEL ...``: one model whose weights are the mean of those of others.

Uniformly or by weights, or a greedy soup (Wortsman et al. 2022, algorithm 1): each model in the order of its score is
kept if the average with it scores no less. Memory is enough for a few rows of all models, whatever their size.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rltrain import __version__
from rltrain.base.errors import CheckpointError, ConfigError, command
from rltrain.base.storage import read_json
from rltrain.models.files.folder import AVERAGE, new_folder
from rltrain.models.files.hashed import Digests
from rltrain.models.weights.adapters import WEIGHTS, read_adapter, write_mean
from rltrain.models.weights.average import DTYPES, Average, Part, read_part
from rltrain.run.checkpoints.model_folder import Named, find_model
from rltrain.workers.node import digest_of

_SETTING = re.compile(r"\+*[a-z_][\w.]*=")


class Averager:
    """Models or adapters, found and looked at, of which any may be averaged."""

    def __init__(self, names: Sequence[str], dtype: str | None) -> None:
        self.models = [find_model(name) for name in names]
        _refuse_odd(self.models, dtype)
        self._dtype = DTYPES[dtype] if dtype else None
        self.are_adapters = self.models[0].is_adapter
        self._parts: list[Part] = [] if self.are_adapters else [read_part(model.path) for model in self.models]
        self._digests: dict[int, dict[str, str]] = {}
        self.notes: list[str] = []
        if not self.are_adapters:
            # Asked of all at once: a model that cannot be averaged is told before anything is written.
            self.notes = Average(self._parts, [1 / len(names)] * len(names), self._dtype).notes

    def write(self, folder: Path, shares: dict[int, float], more: dict[str, object] | None = None) -> None:
        """Write the mean of some models. shares: by number of a model, their sum 1. more: for the manifest."""
        written: Digests = {}
        chosen, values = list(shares), list(shares.values())
        if self.are_adapters:
            adapters = [read_adapter(self.models[number].path) for number in chosen]
            write_mean(adapters, values, folder, written)
        else:
            Average([self._parts[number] for number in chosen], values, self._dtype).write(folder, written)
        files = {str(Path(path).name): digest for path, digest in written.items()}
        content = {"rltrain": __version__, "models": self.described(shares), "files": files, **(more or {})}
        (folder / AVERAGE).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def say_notes(self) -> None:
        """On what is lost of the models."""
        for note in self.notes:
            sys.stderr.write(f"note: {note}\n")

    def described(self, shares: dict[int, float]) -> list[dict[str, object]]:
        """The models of a mean, as its manifest lists them."""
        return [
            {"name": self.models[number].name, "path": _absolute(self.models[number].path), "share": share,
             "files": self._digest(number)}
            for number, share in shares.items()
        ]  # fmt: skip

    def _digest(self, number: int) -> dict[str, str]:
        if number not in self._digests:
            model = self.models[number]
            paths = [Path(model.path) / WEIGHTS] if self.are_adapters else self._parts[number].entries.paths
            self._digests[number] = {path.name: digest_of(path) for path in paths}
        return self._digests[number]


def mean_at(folder: Path, names: Sequence[str]) -> Path:
    """The folder with the mean of models, written where it is not there. Raises RltrainError as `Averager` does.

    Raises ConfigError where the folder is the mean of something else, or the models are adapters.
    """
    averager, shares = Averager(names, None), dict.fromkeys(range(len(names)), 1 / len(names))
    if averager.are_adapters:
        raise ConfigError(f"{names[0]} is an adapter. Name the exported model of its run (global_step_N).")
    if folder.exists():
        then = read_json(folder / AVERAGE) or {}
        if then.get("models") != averager.described(shares):
            raise ConfigError(f"{folder} is not the mean of {', '.join(names)}. Give another out=FOLDER.")
        return folder
    averager.say_notes()
    with new_folder(folder) as new:
        averager.write(new, shares)
    return folder


def _absolute(path: str) -> str:
    """A folder may be found again from elsewhere; a name on the hub stays as it is."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def _refuse_odd(models: Sequence[Named], dtype: str | None) -> None:
    adapters = [model.name for model in models if model.is_adapter]
    others = [model.name for model in models if not model.is_adapter]
    if adapters and others:
        raise CheckpointError(
            f"{adapters[0]} is an adapter and {others[0]} is a model. Average adapters with adapters, or give the "
            "exported model of the run (global_step_N), into which its adapter is merged."
        )
    if adapters and dtype:
        raise ConfigError(f"--dtype {dtype} is for models: adapters are written in float32. Leave it out.")
    paths = [model.path for model in models]
    if again := next((path for path in paths if paths.count(path) > 1), None):
        raise ConfigError(f"{again} is named twice. Name it once, with a larger weight in --weights.")


def _shares(text: str | None, number: int) -> list[float]:
    """Raises ConfigError."""
    if text is None:
        return [1 / number] * number
    try:
        weights = [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {text} are no numbers with commas between them, such as 0.5,0.3,0.2.") from None
    if len(weights) != number:
        raise ConfigError(f"--weights {text} are {len(weights)} and there are {number} models. Give one for each.")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(
            f"--weights {text}: every weight must be above 0. Leave out a model that is to count nothing."
        )
    return [weight / sum(weights) for weight in weights]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write a model whose weights are the mean of those of other models.")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument(
        "models", metavar="MODEL", nargs="+",
        help="a run folder (its newest checkpoint), global_step_N, a model folder, a name on the hub, or an adapter",
    )  # fmt: skip
    parser.add_argument(
        "--weights", metavar="W,W,...", help="one for each model, divided by their sum (default: equal)"
    )
    parser.add_argument(
        "--greedy", metavar="DATA",
        help="a greedy soup: a model stays if the average scores no less with it on these rows. Keys of training "
        "(KEY=VALUE ...) say how they are answered and scored",
    )  # fmt: skip
    parser.add_argument(
        "--metric", metavar="NAME", help="of the validation on DATA (default: mean of val-core/…/mean@N)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the written weights (default: as the first model has them)")
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    names = [word for word in arguments.models if not _SETTING.match(word)]
    settings = [word for word in arguments.models if _SETTING.match(word)]
    if len(names) < 2:
        raise ConfigError(f"there is nothing to average with {', '.join(names) or 'nothing'}. Name two models or more.")
    if not arguments.greedy and (settings or arguments.metric):
        raise ConfigError(f"{(settings or ['--metric'])[0]} is for the validations of --greedy. Leave it out.")
    if arguments.greedy and arguments.weights:
        raise ConfigError("--weights and --greedy contradict each other: a greedy soup is uniform. Give one of them.")
    with new_folder(arguments.out) as folder:
        averager = Averager(names, arguments.dtype)
        averager.say_notes()
        if arguments.greedy:
            shares = _greedy(averager, folder, arguments.greedy, settings, arguments.metric)
        else:
            shares = dict(enumerate(_shares(arguments.weights, len(names))))
            averager.write(folder, shares)
    for number, model in enumerate(averager.models):
        sys.stdout.write(f"{shares.get(number, 0):8.4f}  {model.path}\n")
    sys.stdout.write(f"written: {_absolute(arguments.out)}\n")
    return 0


def _greedy(averager: Averager, folder: Path, data: str, settings: list[str], metric: str | None) -> dict[int, float]:
    """Write the greedy soup into ``folder``. Returns the share of each model that stays."""
    from rltrain.tools.soup import Validation, search

    if averager.are_adapters:
        raise ConfigError("--greedy scores models, and these are adapters. Merge them, or average without --greedy.")
    with TemporaryDirectory(prefix=".tmp_soup_", dir=folder.parent) as work:
        score = Validation(data, settings, metric, Path(work))

        def average(numbers: list[int]) -> Path:
            if len(numbers) == 1:
                return Path(averager.models[numbers[0]].path)
            # One candidate at a time: models are large, and what stays is written anew at the end.
            candidate = Path(work) / "candidate"
            shutil.rmtree(candidate, ignore_errors=True)
            candidate.mkdir()
            averager.write(candidate, dict.fromkeys(numbers, 1 / len(numbers)))
            return candidate

        soup = search(len(averager.models), average, score)
    shares = dict.fromkeys(soup.chosen, 1 / len(soup.chosen))
    averager.write(folder, shares, {"greedy": {"data": data, "score": soup.score, "trials": soup.trials}})
    return shares


if __name__ == "__main__":
    sys.exit(main())
