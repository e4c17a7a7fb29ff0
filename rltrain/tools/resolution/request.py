"""Arguments of ``rltrain resolution``: model, data and pixel bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rltrain.common.errors import ConfigError
from rltrain.config.schema.arguments import read_arguments, required
from rltrain.config.schema.fields import key
from rltrain.tools.evaluate.arguments import NAMES

if TYPE_CHECKING:
    from rltrain.tools.evaluate.models import Model
    from rltrain.tools.evaluate.request import Request

_SPLITS = "dev=FILES is searched on, test=FILES is scored at the end"
Bound = int | None


@dataclass(frozen=True)
class Bounds:
    """The minimum and maximum pixels of an image; None: no bound."""

    least: Bound
    most: Bound

    @property
    def name(self) -> str:
        """The name for folders and tables."""
        return f"min_{self.least or 'none'}_max_{self.most or 'none'}"

    @property
    def words(self) -> list[str]:
        """The keys of the trainer."""
        return [f"data.min_pixels={self.least or 'null'}", f"data.max_pixels={self.most or 'null'}"]


@dataclass(frozen=True)
class Arguments:
    """Arguments that `rltrain evaluate` does not have."""

    model: str = required("the model to search for")
    dev: str = required(_SPLITS)
    test: str = required(_SPLITS)
    min_pixels: list[int | None] = key([], least=1)
    max_pixels: list[int | None] = key([], least=1)


@dataclass(frozen=True)
class SearchRequest:
    """A parsed command line. least, most: bounds to try; empty if the command names none."""

    base: Request
    """The evaluation of the development split with the default bounds."""
    test: list[str]
    least: list[Bound]
    most: list[Bound]

    @property
    def model(self) -> Model:
        """The one model."""
        return self.base.models[0]

    @property
    def root(self) -> Path:
        """The folder of all results."""
        return self.base.out or self.model.output_folder.with_name("resolution") / self.model.name

    def on(self, folder: str, bounds: Bounds | None = None, *words: str) -> Request:
        """Return the evaluation for a folder ("first", "dev" or "test"), with the default bounds or others."""
        # All settings must have the same prompts, so a prompt that is too long for one of them is an error.
        words = (*self.base.words, "data.filter_overlong_prompts=False", *(bounds.words if bounds else []), *words)
        data = self.test if folder == "test" else self.base.data
        out = self.root / folder / (bounds.name if bounds else "default")
        return replace(self.base, data=data, words=list(words), out=out)


def read_search(words: Sequence[str], files: Sequence[str], problems: Sequence[str]) -> SearchRequest:
    """Parse the arguments of a command. Raises ConfigError with all problems, and as `read_request` does."""
    rest, wrong = list[str](), list(problems)
    wrong += [f"{word}: {_SPLITS}. Leave data= out." for word in words if word.startswith("data=")]
    own = read_arguments(Arguments, words, others=rest, elsewhere=NAMES, problems=wrong)
    from rltrain.data.files import files_of
    from rltrain.tools.evaluate.request import read_request  # after the errors above, because it takes seconds

    base, test = (
        read_request([*rest, f"model={own.model}", f"data={name}"], files, []) for name in (own.dev, own.test)
    )
    if len(base.models) > 1:
        raise ConfigError(f"model= names {len(base.models)} models. Start a search for each, with its own out=FOLDER.")
    dev_files, test_files = (
        {Path(file).resolve() for name in split.data for file in files_of(name)} for split in (base, test)
    )
    if shared := dev_files & test_files:
        raise ConfigError(
            f"{sorted(shared)[0]} is in dev= and in test=: the figure of the chosen setting would be too good. Use "
            "other rows for test=."
        )
    return SearchRequest(base, test.data, list(dict.fromkeys(own.min_pixels)), list(dict.fromkeys(own.max_pixels)))
