"""The words of ``rltrain resolution``: which model, which data, which bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rltrain.base.errors import ConfigError
from rltrain.config.schema.arguments import listed, read_arguments, required
from rltrain.config.schema.fields import key
from rltrain.data.files import files_of
from rltrain.run.checkpoints.mean import mean_at
from rltrain.tools.evaluate.models import Model, models_of, places
from rltrain.tools.evaluate.request import NAMES, Request, read_request

NONE, MEAN = "none", "mean"
_SPLITS = "dev=FILES is searched on, test=FILES is scored at the end"
Bound = int | None


@dataclass(frozen=True)
class Bounds:
    """Images are scaled to so many pixels, at least and at most; None: no such bound."""

    least: Bound
    most: Bound

    @property
    def name(self) -> str:
        """Of folders, in tables."""
        return f"min_{self.least or NONE}_max_{self.most or NONE}"

    @property
    def words(self) -> list[str]:
        """As the trainer's command line has them."""
        return [f"data.min_pixels={self.least or 'null'}", f"data.max_pixels={self.most or 'null'}"]


@dataclass(frozen=True)
class Arguments:
    """Arguments of the command that `rltrain evaluate` does not have."""

    dev: str = required(_SPLITS)
    test: str = required(_SPLITS)
    average: str = ""
    min_pixels: list[int | None] = key([], least=1)
    max_pixels: list[int | None] = key([], least=1)


@dataclass(frozen=True)
class SearchRequest:
    """A command line that has been read."""

    base: Request
    """Of the development split, with the default bounds."""
    test: list[str]
    least: list[Bound]
    most: list[Bound]
    """Bounds to try; empty where the command names none."""
    averaged: list[str]
    """The models whose mean is searched for, the first of which `base` has until it is made; empty for ``model=``."""

    @property
    def model(self) -> Model:
        """The one model."""
        return self.base.models[0]

    @property
    def root(self) -> Path:
        """The folder of all results."""
        return self.base.out or self.model.beside.with_name("resolution") / self.model.name

    def for_mean(self) -> SearchRequest:
        """The search for the mean of ``averaged``, which is made where it is not there. Raises as `mean_at` does."""
        folder = mean_at(self.root / MEAN, self.averaged)
        return replace(self, base=replace(self.base, models=models_of([str(folder)])))

    def on(self, split: str, bounds: Bounds | None = None) -> Request:
        """The evaluation of a split ("dev", "test"), with the default bounds or others."""
        words = [*self.base.words, *(bounds.words if bounds else [])]
        data = self.base.data if split == "dev" else self.test
        return replace(
            self.base, data=data, words=words, out=self.root / split / (bounds.name if bounds else "default")
        )


def read_search(words: Sequence[str], files: Sequence[str], problems: Sequence[str]) -> SearchRequest:
    """Read the words of a command. Raises ConfigError with what is wrong with them, and as `read_request` does."""
    rest, wrong = list[str](), list(problems)
    wrong += [f"{word}: {_SPLITS}. Leave data= out." for word in words if word.startswith("data=")]
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    averaged = list[str]()
    if given.get("average"):
        averaged = [place for name in listed(given["average"]) for place in places(name, "average")]
        wrong += _problems_of_mean(given["average"], averaged, "model" in given, "out" in given)
    elif "model" not in given:
        wrong.append("model= is not given: the model to search for.")
    words = [word for word in words if not word.startswith("data=")]
    own = read_arguments(Arguments, words, others=rest, elsewhere=NAMES, problems=wrong)
    rest += [f"model={name}" for name in averaged[:1]]
    least, most = list(dict.fromkeys(own.min_pixels)), list(dict.fromkeys(own.max_pixels))
    base = read_request([*rest, f"data={own.dev}"], files, [])
    test = read_request([*rest, f"data={own.test}"], files, []).data
    if len(base.models) > 1:
        raise ConfigError(
            f"model= names {len(base.models)} models: a search is for one. Start one for each, with an out= of its own."
        )
    shared = {path.resolve() for path in _files(base.data)} & {path.resolve() for path in _files(test)}
    if shared:
        raise ConfigError(
            f"{sorted(shared)[0]} is in dev= and in test=: the number of what was chosen on it would be too good. Give "
            "other rows for test=."
        )
    return SearchRequest(base, test, least, most, averaged)


def _problems_of_mean(text: str, models: Sequence[str], has_model: bool, has_out: bool) -> Iterator[str]:
    if has_model:
        yield f"average={text} and model= contradict each other: the mean is the model. Leave one out."
    if len(models) < 2:
        yield f"average={text}: there is nothing to average. Name two models or more, or model= for one."
    if not has_out:
        yield f"average={text} needs out=FOLDER: the mean is written into its folder {MEAN}."


def _files(names: Sequence[str]) -> list[Path]:
    return [Path(file) for name in names for file in files_of(name)]
