"""The words of ``rltrain resolution``: which model, which data, which bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rltrain.base.errors import ConfigError
from rltrain.data.files import files_of
from rltrain.run.checkpoints.mean import mean_at
from rltrain.tools.evaluate.models import Model, models_of, places
from rltrain.tools.evaluate.request import Request, listed, read_request

NONE, MEAN = "none", "mean"
_MEANINGS = {
    "data": "dev=FILES is searched on, test=FILES is scored at the end",
    "model": "the model to search for",
}
_BOUNDS = ("min_pixels", "max_pixels")
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
    own, rest, wrong = dict[str, str](), list[str](), list(problems)
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key in ("dev", "test", "average", *_BOUNDS):
            own[key] = text
        elif key == "data":
            wrong.append(f"{word}: {_MEANINGS['data']}. Leave data= out.")
        else:
            rest.append(word)
    for split in ("dev", "test"):
        if not own.get(split):
            wrong.append(f"{split}= is not given: {_MEANINGS['data']}.")
    least, most = (_bounds(name, own[name], wrong) if name in own else [] for name in _BOUNDS)
    averaged = list[str]()
    has_model = any(word.startswith("model=") for word in rest)
    if own.get("average"):
        averaged = [place for name in listed(own["average"]) for place in places(name, "average")]
        wrong += _problems_of_mean(own["average"], averaged, has_model, any(word.startswith("out=") for word in rest))
        rest += [f"model={name}" for name in averaged[:1]]
    elif not has_model:
        wrong.append(f"model= is not given: {_MEANINGS['model']}.")
    if wrong:
        raise ConfigError("\n".join(wrong))
    base = read_request([*rest, f"data={own['dev']}"], files, [])
    test = read_request([*rest, f"data={own['test']}"], files, []).data
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


def _bounds(name: str, text: str, wrong: list[str]) -> list[Bound]:
    bounds = list[Bound]()
    for word in text.strip("[]").split(","):
        value = word.strip()
        if value == NONE:
            bounds.append(None)
        elif value.isdigit() and int(value) > 0:
            bounds.append(int(value))
        else:
            wrong.append(f"{name}={text}: {value!r} is no number of pixels. Give whole numbers from 1 on, or {NONE}.")
    return list(dict.fromkeys(bounds))
