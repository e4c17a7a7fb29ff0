"""``python -m rltrain.average OUT MODEL MODEL ...``: the mean of the weights of several models.

The mean is uniform, weighted, or a greedy soup (Wortsman et al. 2022, algorithm 1). A few rows of all models are in
memory at a time.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rltrain.common.errors import ConfigError, command

if TYPE_CHECKING:
    from rltrain.run.checkpoints.averager import Averager

_SETTING = re.compile(r"\+*[a-z_][\w.]*=")
_CORE = re.compile(r"val-core/.*/mean@\d+")
_DATA, _MODEL, _OUT = "data.val_files", "actor_rollout_ref.model.path", "trainer.default_local_dir"
Shares = dict[int, float]  # index of a model -> its share; the shares sum to 1
_DTYPES = ("float32", "bfloat16", "float16")


def search(num_models: int, score: Callable[[list[int]], float]) -> tuple[list[int], dict[str, object]]:
    """Return the selected models, best first, and the score of their average with all trials.

    Each model is tried once, in order of score. score: returns the score of the average of some models; higher is
    better.
    """
    scores = [score([number]) for number in range(num_models)]
    trials: list[dict[str, object]] = [{"models": [number], "score": value} for number, value in enumerate(scores)]
    # The sort is stable, so that models with equal scores keep their order.
    best, *others = sorted(range(num_models), key=lambda number: -scores[number])
    chosen, highest = [best], scores[best]
    for number in others:
        candidate = [*chosen, number]
        value = score(candidate)
        trials.append({"models": candidate, "score": value, "stays": value >= highest})
        if value >= highest:
            chosen, highest = candidate, value
    return chosen, {"score": highest, "trials": trials}


def greedy_soup(
    averager: Averager, folder: Path, data: str, settings: Sequence[str], metric: str | None
) -> tuple[Shares, dict[str, object]]:
    """Return the shares of a greedy soup, and its record for average.json.

    Candidates are validated on ``data`` in a temporary folder next to ``folder``. settings: KEY=VALUE of a training.
    metric: validation metric; None: the mean of ``val-core/…/mean@N``. Raises ConfigError.
    """
    own = (_DATA, _MODEL, _OUT)
    if taken := [word for word in settings if word.lstrip("+").partition("=")[0] in own]:
        raise ConfigError(f"{taken[0]}: with --greedy, DATA, MODEL and OUT set this key. Remove it.")
    if averager.are_adapters:
        raise ConfigError("--greedy scores models, and these are adapters. Merge them, or average without --greedy.")
    from rltrain.api import evaluate  # imported here, because the import takes seconds

    def score(numbers: list[int]) -> float:
        # Only one candidate is on disk at a time, because models are large.
        with TemporaryDirectory(prefix=".tmp_soup_", dir=folder.parent) as candidate:
            averager.write(Path(candidate), dict.fromkeys(numbers, 1 / len(numbers)), {})
            words = [f"{_DATA}={data}", f"{_MODEL}={candidate}", f"{_OUT}={candidate}/evaluation"]
            value = _score(evaluate([*settings, *words]), metric)
        sys.stdout.write(f"{value:10.4f}  {' + '.join(averager.paths[number] for number in numbers)}\n")
        return value

    chosen, found = search(len(averager.paths), score)
    return dict.fromkeys(chosen, 1 / len(chosen)), {"greedy": {"data": data, **found}}


def _score(metrics: Mapping[str, float], metric: str | None) -> float:
    names = [metric] if metric else [name for name in metrics if _CORE.fullmatch(name)]
    if not names or names[0] not in metrics:
        raise ConfigError(
            f"--metric {metric}: a validation with these settings has the metrics {', '.join(sorted(metrics))}."
        )
    return sum(metrics[name] for name in names) / len(names)


def _shares(text: str | None, num_models: int) -> Shares:
    """Return the normalised weights. Raises ConfigError."""
    try:
        weights = [1.0] * num_models if text is None else [float(word) for word in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != num_models or not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(f"--weights {text}: give {num_models} numbers above 0, such as 0.5,0.3,0.2: one per model.")
    return {number: weight / sum(weights) for number, weight in enumerate(weights)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rltrain average", description="Average the weights of models.")
    parser.add_argument("out", metavar="OUT", help="the folder to create")
    models = "a run folder (its newest checkpoint), global_step_N, a model folder, a name on the hub, or an adapter"
    parser.add_argument("models", metavar="MODEL", nargs="+", help=models)
    weights = "a weight for each model; they are divided by their sum (default: equal)"
    parser.add_argument("--weights", metavar="W,W,...", help=weights)
    greedy = "a greedy soup, scored on these rows. Keys of training (KEY=VALUE ...) set sampling and scoring"
    parser.add_argument("--greedy", metavar="DATA", help=greedy)
    metric = "metric of the validation on DATA (default: mean of val-core/…/mean@N)"
    parser.add_argument("--metric", metavar="NAME", help=metric)
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="dtype of the written weights (default: as in the first model)"
    )
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    names = [word for word in arguments.models if not _SETTING.match(word)]
    settings = [word for word in arguments.models if _SETTING.match(word)]
    if len(names) < 2:
        raise ConfigError(f"there is nothing to average with {', '.join(names) or 'nothing'}. Name two models or more.")
    if not arguments.greedy and (settings or arguments.metric):
        raise ConfigError(f"{(settings or ['--metric'])[0]} is for the validations of --greedy. Remove it.")
    if arguments.greedy and arguments.weights:
        raise ConfigError("--weights and --greedy contradict each other: a greedy soup is uniform. Give one of them.")
    shares, soup = _shares(arguments.weights, len(names)), dict[str, object]()
    from rltrain.models.files.folder import new_folder
    from rltrain.run.checkpoints.averager import Averager  # after the errors above, because it takes seconds

    with new_folder(arguments.out) as folder:
        averager = Averager(names, arguments.dtype)
        for note in averager.notes:
            sys.stderr.write(f"note: {note}\n")
        if arguments.greedy:
            shares, soup = greedy_soup(averager, folder, arguments.greedy, settings, arguments.metric)
        averager.write(folder, shares, soup)
    for number, path in enumerate(averager.paths):
        sys.stdout.write(f"{shares.get(number, 0):8.4f}  {path}\n")
    sys.stdout.write(f"written: {Path(arguments.out).expanduser().resolve()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
