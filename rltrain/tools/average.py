"""``python -m rltrain.average OUT MODEL MODEL ...``: one model whose weights are the mean of those of others.

Uniformly or by weights, or a greedy soup (Wortsman et al. 2022, algorithm 1): each model in the order of its score is
kept if the average with it scores no less. Memory is enough for a few rows of all models, whatever their size.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rltrain.base.errors import ConfigError, command
from rltrain.models.files.folder import new_folder
from rltrain.models.weights.average import DTYPES
from rltrain.run.checkpoints.mean import Averager, absolute

_SETTING = re.compile(r"\+*[a-z_][\w.]*=")


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
    parser = argparse.ArgumentParser(prog="python -m rltrain.average", description="Average the weights of models.")
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
    sys.stdout.write(f"written: {absolute(arguments.out)}\n")
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
