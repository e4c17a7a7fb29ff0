"""Rules for the folders of responses in verl's format.

Each needs a separate folder, because its files are named by the number of the step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatch

from rltrain.config.schema import Config

_TRAIN, _VAL = "trainer.rollout_data_dir", "trainer.validation_data_dir"
# Names in the run folder that the run moves, counts or removes.
_OF_THE_RUN = (
    ".", "samples", "tensorboard", "logs", "incidents", "objects", "global_step_*", "damaged_global_step_*",
    "earlier_*", "evaluation_*",
)  # fmt: skip


def folder_problems(config: Config) -> Iterator[str]:
    """Yield errors for folders whose files would overwrite each other, or files of the run."""
    trainer = config.trainer
    named = {} if trainer.val_only or not trainer.rollout_data_dir else {_TRAIN: trainer.rollout_data_dir}
    if config.data.val_files and trainer.validation_data_dir:
        named[_VAL] = trainer.validation_data_dir
    if len({_real(name) for name in named.values()}) < len(named):
        yield (
            f"{_TRAIN}={named[_TRAIN]} and {_VAL}={named[_VAL]} are one folder, where the N.jsonl of a step and of its "
            f"validation are one file. Give each a folder of its own, such as {_VAL}={named[_VAL].rstrip('/')}/val."
        )
        return
    run = _real(trainer.default_local_dir)
    for key, name in named.items():
        # The first part below the run folder: all files in a checkpoint are removed with it.
        inside = os.path.relpath(_real(name), run).split(os.sep)[0]
        if any(fnmatch(inside, pattern) for pattern in _OF_THE_RUN):
            yield (
                f"{key}={name} is a folder that the run itself writes into (trainer.default_local_dir="
                f"{trainer.default_local_dir}). Give one of its own, such as "
                f"{key}={os.path.join(trainer.default_local_dir, key.removeprefix('trainer.'))}."
            )


def _real(name: str) -> str:
    return os.path.realpath(os.path.expanduser(name))
