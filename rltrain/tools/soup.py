"""The greedy soup (Wortsman et al. 2022, algorithm 1): a model stays in the average if that scores no less with it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rltrain.api import evaluate
from rltrain.base.errors import ConfigError

_CORE = re.compile(r"val-core/.*/mean@\d+")
# What the soup itself says.
_OWN = {"data.val_files": "--greedy", "actor_rollout_ref.model.path": "MODEL", "trainer.default_local_dir": "OUT"}


@dataclass
class Soup:
    """What a greedy search has found."""

    chosen: list[int]
    """Numbers of the models that stay, the best first."""
    score: float
    trials: list[dict[str, object]] = field(default_factory=list)
    """Every look: the models, their score, and whether the last of them stayed."""


def search(num_models: int, average: Callable[[list[int]], Path], score: Callable[[Path], float]) -> Soup:
    """The models in the order of their scores, the first of equals first; each is tried once.

    average(numbers): the folder with the mean of these models. score(folder): the higher, the better.
    """
    scores = [score(average([number])) for number in range(num_models)]
    best, *others = sorted(range(num_models), key=lambda number: -scores[number])
    soup = Soup([best], scores[best])
    soup.trials = [{"models": [number], "score": value} for number, value in enumerate(scores)]
    for number in others:
        candidate = [*soup.chosen, number]
        value = score(average(candidate))
        stays = value >= soup.score
        soup.trials.append({"models": candidate, "score": value, "stays": stays})
        if stays:
            soup.chosen, soup.score = candidate, value
    return soup


class Validation:
    """Scores a model folder on ``data`` by `evaluate`; settings: words of a training's command, KEY=VALUE.

    metric: of the validation; None: the mean of the main ones (``val-core/…/mean@N``). work: a folder for its runs.
    Raises ConfigError.
    """

    def __init__(self, data: str, settings: Sequence[str], metric: str | None, work: Path) -> None:
        if own := next((key for word in settings if (key := word.partition("=")[0].lstrip("+")) in _OWN), None):
            raise ConfigError(f"{own} is what {_OWN[own]} says here. Leave the key out.")
        self._words, self._metric, self._work, self._count = [*settings, f"data.val_files={data}"], metric, work, 0

    def __call__(self, folder: Path) -> float:
        """Raises ConfigError where the validation has no such metric."""
        self._count += 1
        metrics = evaluate([
            *self._words, f"actor_rollout_ref.model.path={folder}",
            f"trainer.default_local_dir={self._work / f'evaluation_{self._count}'}",
        ])  # fmt: skip
        names = [self._metric] if self._metric else [name for name in metrics if _CORE.fullmatch(name)]
        if not names or names[0] not in metrics:
            raise ConfigError(
                f"--metric {self._metric}: a validation of these settings finds no number of that name. It finds "
                f"{', '.join(sorted(metrics))}."
            )
        score = sum(metrics[name] for name in names) / len(names)
        sys.stdout.write(f"{score:10.4f}  {folder}\n")
        return score
