"""The words of ``rltrain simulate``: settings, device, lengths, assumptions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rltrain.base.chips import CHIPS, Chip, find_chip
from rltrain.base.device import get_device
from rltrain.base.errors import ConfigError, short
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.loaded import LoadedConfig
from rltrain.run.seconds.about import chip_here
from rltrain.run.seconds.assumptions import Assumptions
from rltrain.run.seconds.lengths import Lengths, read_lengths
from rltrain.run.seconds.step import Foretold, foretell
from rltrain.tools.simulate.calibration import Calibration, calibrate
from rltrain.trainer.plan import Plan, make_plan

# In the place of data, which decides nothing but the lengths.
_NO_DATA = "data.train_files=none"


@dataclass(frozen=True)
class Request:
    """A command line that has been read."""

    words: list[str]
    """Keys of training."""
    files: list[str]
    problems: list[str]
    """What is wrong with flags."""
    chip: Chip
    assumed: Assumptions
    lengths: Lengths
    calibration: Calibration | None

    def load(self, words: Sequence[str]) -> LoadedConfig:
        """The settings of ``words``. Raises ConfigError with all that is wrong with them."""
        loaded = load_config(words, self.files, self.problems)
        if not loaded.config.data.train_files:
            loaded = load_config([_NO_DATA, *words], self.files, self.problems)
        check(loaded)
        return loaded

    def foretell(self, words: Sequence[str]) -> tuple[LoadedConfig, Plan, Foretold]:
        """A step with ``words``. Raises ConfigError."""
        loaded = self.load(words)
        plan = make_plan(loaded.config)
        if not plan.passes.trains:
            raise ConfigError("trainer.val_only=True: an evaluation has no step. Leave it out.")
        memory = self.memory_bytes(loaded)
        return loaded, plan, foretell(loaded.config, plan, self.lengths, self.chip, self.assumed, memory)

    def memory_bytes(self, loaded: LoadedConfig) -> int | None:
        """Of one device; None: unknown."""
        if gib := loaded.config.trainer.device_memory_gb:
            return round(gib * 2**30)
        return round(self.chip.memory_bytes) or None


def read_request(own: argparse.Namespace, arguments: argparse.Namespace) -> Request:
    """own: the flags of this program. Raises ConfigError, DataError."""
    chip = named_chip(own.device) if own.device else None
    run = Path(own.run).expanduser() if own.run else None
    calibration = calibrate(run, chip) if run else None
    files = [*([str(run / "config.yaml")] if run else []), *arguments.config]
    words = list(arguments.overrides)
    if own.nodes is not None:
        words.append(f"trainer.nnodes={_positive('--nodes', own.nodes)}")
    if known := calibration.chip if calibration else chip:
        # The one of the chip stands in front: what a person writes counts.
        words.insert(0, f"trainer.device={known.kind}")
    known = known or _chip_here(words, files)
    assumed = calibration.assumed if calibration else Assumptions()
    lengths = read_lengths(own.lengths) if own.lengths else calibration.lengths if calibration else None
    if lengths is None:
        raise ConfigError(
            "--lengths is not given: how long answers get decides what a step takes. Give mean:TOKENS,max:TOKENS, a "
            "file with a number in each line, the folder of a run, or --from RUN."
        )
    return Request(words, files, arguments.problems, known, assumed.with_words(own.assume or ""), lengths, calibration)


def named_chip(name: str) -> Chip:
    """The chip that a person means: "H100", "910B3". Raises ConfigError."""
    chip = find_chip(name) or find_chip(f"Ascend{name}")
    if chip is None:
        known = ", ".join(sorted(chip.name.removeprefix("Ascend") for chip in CHIPS.values()))
        raise ConfigError(f"--device {short(name)}: nobody knows the peaks of this chip. Known are {known}.")
    return chip


def _chip_here(words: Sequence[str], files: Sequence[str]) -> Chip:
    device = get_device(load_config(words, files).config.trainer.device)
    chip = chip_here(device)
    if chip is None:
        here = "no accelerator whose peaks are known is here" if not device.is_cpu else "a CPU has no peaks to go by"
        raise ConfigError(f"--device is not given, and {here}. Give --device H100 (or another), or --from RUN.")
    return chip


def _positive(flag: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{flag} {short(text)} is no number of nodes. Give 1 or more.")
    return int(text)
