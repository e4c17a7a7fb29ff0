"""Where metrics go: metrics.jsonl always; console, TensorBoard and Weights & Biases as ``trainer.logger`` says."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

log = logging.getLogger(__name__)

# What a line on the console shows, in this order.
CONSOLE = {
    "critic/score/mean": "score",
    "response_length/mean": "length",
    "actor/pg_loss": "pg_loss",
    "actor/kl_loss": "kl",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "lr",
    "perf/throughput": "tok/s/device",
    "timing_s/step": "step_s",
}


class Sink(Protocol):
    """Somewhere metrics go."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a step, flushed. On resume the lines after the resumed step are dropped."""

    def __init__(self, file: Path, resumed_step: int) -> None:
        kept = []
        if file.exists():
            kept = [line for line in file.read_text().splitlines() if _step_of(line) <= resumed_step]
        file.write_text("".join(f"{line}\n" for line in kept) if resumed_step else "")
        self._file = open(file, "a")  # noqa: SIM115 - open for the run

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Console:
    """A progress bar on a terminal, one line a step in a file."""

    def __init__(self, first_step: int, total_steps: int) -> None:
        self._total = total_steps
        self._bar = (
            tqdm(total=total_steps, initial=first_step, desc="rltrain", unit="step") if sys.stderr.isatty() else None
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        shown = {label: f"{metrics[name]:.4g}" for name, label in CONSOLE.items() if name in metrics}
        shown |= {name: f"{value:.4g}" for name, value in metrics.items() if name.startswith("val-core/")}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            sys.stdout.write(f"step {step}/{self._total}  " + "  ".join(f"{k}={v}" for k, v in shown.items()) + "\n")
            sys.stdout.flush()

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        pass  # a console has no tables

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class TensorBoard:
    """Scalars for TensorBoard; on resume the events after the resumed step are purged."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._writer.add_text(name, markdown_table(columns, rows), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run (needs the wandb package)."""

    def __init__(self, project: str, name: str, config: dict[str, Any], folder: Path) -> None:
        import wandb

        self._run = wandb.init(project=project, name=name, config=config, dir=str(folder), resume="allow")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()


class Tracker:
    """Sends metrics to every sink; a sink that fails is named once and dropped, and training goes on."""

    def __init__(
        self,
        loggers: Sequence[str],
        folder: Path,
        *,
        first_step: int,
        total_steps: int,
        project: str,
        name: str,
        config: dict[str, Any],
    ) -> None:
        makers = {
            "console": lambda: Console(first_step, total_steps),
            "tensorboard": lambda: TensorBoard(folder / "tensorboard", first_step),
            "wandb": lambda: WandB(project, name, config, folder),
        }
        self._always = JsonLines(folder / "metrics.jsonl", first_step)
        self._sinks: dict[str, Sink] = {}
        for logger in loggers:
            if logger == "wandb" and importlib.util.find_spec("wandb") is None:
                log.warning(
                    "trainer.logger names wandb, which is not installed (pip install wandb); going on without it"
                )
                continue
            self._attempt(logger, lambda make=makers[logger], logger=logger: self._sinks.update({logger: make()}))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._always.log(step, metrics)
        for name, sink in list(self._sinks.items()):
            self._attempt(name, lambda sink=sink: sink.log(step, metrics))

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Send a table (text, numbers; such as sampled answers) to every tracker that has them. name: "samples/train" or the like."""
        for key, sink in list(self._sinks.items()):
            self._attempt(key, lambda sink=sink: sink.log_table(step, name, columns, rows))

    def close(self) -> None:
        self._always.close()
        for name, sink in list(self._sinks.items()):
            self._attempt(name, sink.close)

    def _attempt(self, name: str, action: Any) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a tracker that is down must not stop training
            log.warning("tracker '%s' failed and is left out from here on: %s", name, error)
            self._sinks.pop(name, None)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as Markdown, one line a row, whatever the cells hold."""
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(each) for each in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return sys.maxsize
