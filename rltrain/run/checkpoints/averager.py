"""Computation of the averages that ``rltrain average`` writes. Separate from the command, because its imports take
seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rltrain.common import __version__
from rltrain.common.errors import CheckpointError, ConfigError
from rltrain.models.files.folder import AVERAGE
from rltrain.models.files.hashed import Digests
from rltrain.models.weights.adapters import WEIGHTS, read_adapter, write_mean
from rltrain.models.weights.average import DTYPES, Average, read_part
from rltrain.run.checkpoints.model_folder import find_model
from rltrain.workers.diagnostics.node import digest_of


class Averager:
    """Models or adapters to average. All are checked against each other before anything is written."""

    def __init__(self, names: Sequence[str], dtype: str | None) -> None:
        self._found = [find_model(name) for name in names]
        # Folders are absolute paths, so that average.json can be read from any folder. Names on the hub stay unchanged.
        paths = (model.path for model in self._found)
        self.paths = [str(Path(path).resolve()) if Path(path).is_dir() else path for path in paths]
        kinds = {model.is_adapter: model.name for model in self._found}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{kinds[True]} is an adapter and {kinds[False]} is a model. Average adapters with adapters, or give "
                "the exported model of the run (global_step_N), into which its adapter is merged."
            )
        self.are_adapters = self._found[0].is_adapter
        if self.are_adapters and dtype:
            raise ConfigError(f"--dtype {dtype} is for models: adapters are written in float32. Remove it.")
        self._dtype = DTYPES[dtype] if dtype else None
        self._parts = [] if self.are_adapters else [read_part(path) for path in self.paths]
        if not self.are_adapters:
            Average(self._parts, [])  # raises before hours of a greedy soup

    def write(self, folder: Path, shares: Mapping[int, float], soup: dict[str, object]) -> None:
        """Write the mean of some models, and average.json: models, shares, digests of weight files, ``soup``."""
        written: Digests = {}
        if self.are_adapters:
            write_mean([read_adapter(self.paths[n]) for n in shares], list(shares.values()), folder, written)
        else:
            mean = Average([self._parts[number] for number in shares], list(shares.values()), self._dtype)
            mean.write(folder, written)
        models = []
        for number, share in shares.items():
            path = self.paths[number]
            files = [Path(path) / WEIGHTS] if self.are_adapters else self._parts[number].entries.paths
            digests = {file.name: digest_of(file) for file in files}
            models.append({"name": self._found[number].name, "path": path, "share": share, "files": digests})
        files_of_mean = {Path(path).name: digest for path, digest in written.items()}
        content = {"rltrain": __version__, "models": models, "files": files_of_mean, **soup}
        (folder / AVERAGE).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
