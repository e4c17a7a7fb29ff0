"""The mean of models or adapters that a person names, in a folder with a manifest of what went in."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rltrain import __version__
from rltrain.base.errors import CheckpointError, ConfigError, plain
from rltrain.models.files.folder import AVERAGE
from rltrain.models.files.hashed import Digests
from rltrain.models.weights.adapters import WEIGHTS, read_adapter, write_mean
from rltrain.models.weights.average import DTYPES, Average, Part, read_part
from rltrain.run.checkpoints.model_folder import Named, find_model
from rltrain.workers.node import digest_of


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
            sys.stderr.write(plain(f"note: {note}\n"))

    def described(self, shares: dict[int, float]) -> list[dict[str, object]]:
        """The models of a mean, as its manifest lists them."""
        return [
            {"name": self.models[number].name, "path": absolute(self.models[number].path), "share": share,
             "files": self._digest(number)}
            for number, share in shares.items()
        ]  # fmt: skip

    def _digest(self, number: int) -> dict[str, str]:
        if number not in self._digests:
            model = self.models[number]
            paths = [Path(model.path) / WEIGHTS] if self.are_adapters else self._parts[number].entries.paths
            self._digests[number] = {path.name: digest_of(path) for path in paths}
        return self._digests[number]


def absolute(path: str) -> str:
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
