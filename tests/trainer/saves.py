"""Savers, and complete runs in this process."""

from collections.abc import Callable
from contextlib import ExitStack

from rltrain.common.stop import Stop
from rltrain.config.load import load_config
from rltrain.config.schema import Config
from rltrain.run.callbacks.callback import CallbackList
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.saver import Saver
from rltrain.run.fit import Trainer
from tests.clock import VirtualClock

GRPO = "algorithm.adv_estimator=grpo"


def saver_of(folder: RunFolder, *settings: str, dataset="rows:1 5 rows of a.parquet", **parts) -> tuple[Saver, Config]:
    """Return a saver of a model of 1000 weights (16,000 bytes). parts: arguments of `Saver`; without an actor it writes
    no weights."""
    cfg = load_config([f"trainer.default_local_dir={folder.path}", *settings]).config
    return Saver(cfg, folder, parts.pop("actor", None), None, dataset, 16_000, **parts), cfg


def fit(ppo, folder: RunFolder, saver: Saver, callback, first_step: int = 0) -> bool:
    """Run the remaining steps. Return whether the run finished."""
    stack, callbacks = ExitStack(), CallbackList(callback)
    return Trainer(ppo.cfg, ppo.plan, folder, Stop(), first_step, stack, ppo, saver, callbacks).fit()


def after_sleeps(clock: VirtualClock, number: int, do: Callable[[], object]) -> None:
    """Call ``do`` in the sleep with this number, counted from now."""
    sleep, before = clock.sleep, len(clock.asked)

    def counted(seconds: float) -> None:
        sleep(seconds)
        if len(clock.asked) == before + number:
            do()

    clock.sleep = counted
