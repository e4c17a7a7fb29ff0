"""The trackers of ``trainer.logger``: thin wrappers of packages, which `Tracker` calls in threads.

accelerate.tracking is not used, because it needs global state and supports neither tables nor resumed runs.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.common.env import volcengine_account
from rltrain.common.errors import first_line
from rltrain.config.load import flat

log = logging.getLogger(__name__)

Rows = Sequence[Sequence[Any]]
# Name of the training step among the metrics.
_STEP = "training/global_step"


@dataclass(frozen=True)
class RunInfo:
    """Description of a run for a tracker."""

    project: str
    name: str
    config: dict[str, Any]
    folder: Path
    first_step: int = 0
    run_id: str | None = None
    """The tracker's id of a run to continue (None: a new run)."""
    chosen: bool = True
    """True if the user chose the name."""


class Sink:
    """Base class of trackers, by default with the interface of wandb. run_id: id of the tracker's run, by which a
    resumed run continues it."""

    run_id: str | None = None
    _run: Any
    _table: Callable[[list[str], list[list[Any]]], Any]

    def __init__(self, run: RunInfo) -> None:
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(metrics, step=step)

    def log_table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self.log(step, {name: self._table(columns, rows)})

    def finish(self, summary: dict[str, float], failed: bool) -> None:
        self._run.log(summary)
        self._run.finish()


class TensorBoard(Sink):
    """TensorBoard tracker of scalars and texts. On resume, events after the resumed step are purged."""

    def __init__(self, run: RunInfo) -> None:
        # Packages are imported where they are used, because they are slow, and only the chosen ones have to be
        # installed.
        from torch.utils.tensorboard import SummaryWriter

        purge = run.first_step + 1 if run.first_step else None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)
        self.log_table(run.first_step, "config", ["key", "value"], [list(pair) for pair in flat(run.config).items()])

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self._writer.add_text(name, markdown_table(columns, rows), step)
        self._writer.flush()

    def finish(self, summary: dict[str, float], failed: bool) -> None:
        self.log_table(0, "summary", ["metric", "value"], [list(pair) for pair in summary.items()])
        self._writer.close()


class WandB(Sink):
    """Weights & Biases tracker. If there is no login or the server does not respond, it writes offline files for `wandb
    sync`.

    wandb silently drops entries whose step is below an earlier one, as in a resumed run or after a retry. So wandb's
    own step counts entries, and the training step is the axis of all plots.
    """

    def __init__(self, run: RunInfo) -> None:
        import wandb

        self._table = lambda columns, rows: wandb.Table(columns=[*columns], data=rows)
        named: dict[str, Any] = {"project": run.project, "name": run.name, "config": run.config, "dir": str(run.folder)}
        named |= {"id": run.run_id, "resume": "allow" if run.run_id else None}
        # otherwise wandb would capture the terminal with the progress bar
        named["settings"] = wandb.Settings(console="off")
        why = ""
        if wandb.setup().settings.mode == "online":
            # If earlier attempts have unsent offline files, this one writes offline too, to keep the entries in order.
            waits = run.run_id and any(folder.name.endswith(f"-{run.run_id}") for folder in unsent_wandb(run.folder))
            why = "earlier steps of this run are not sent yet" if waits else wandb_refusal()
        if not why:
            try:
                self._run = wandb.init(**named)
            except wandb.errors.Error as error:  # the server became unreachable, or denies access to the project
                why = first_line(error).rstrip(".")
        if why:
            self._run = wandb.init(**named, mode="offline")
            text = "tracker 'wandb': %s. Metrics go to %s; send them after the run with: wandb sync %s"
            log.warning(text, why, run.folder / "wandb", run.folder / "wandb/offline-run-*")
        self.run_id = self._run.id
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({**metrics, _STEP: step})

    def finish(self, summary: dict[str, float], failed: bool) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=int(failed))


class VemlpWandB(Sink):
    """Tracker of Volcengine's machine learning platform, whose module has the interface of wandb.

    This class is written from the platform's documentation only.
    """

    def __init__(self, run: RunInfo) -> None:
        import volcengine_ml_platform
        from volcengine_ml_platform import wandb

        volcengine_ml_platform.init(**volcengine_account())
        wandb.init(project=run.project, name=run.name, config=run.config)
        self._table = lambda columns, rows: wandb.Table(columns=[*columns], data=rows)
        self._run = wandb


class MLflow(Sink):
    """MLflow tracker, at MLFLOW_TRACKING_URI or MLflow's default location."""

    run_id: str

    def __init__(self, run: RunInfo) -> None:
        from mlflow import MlflowClient

        # The client takes the run id with every call; the functions of `mlflow` depend on an active run, which is
        # global state.
        self._client = MlflowClient()
        if run.run_id:
            self.run_id = run.run_id
            # An earlier attempt has set the status to finished or failed.
            self._client.update_run(run.run_id, status="RUNNING")
            return
        existing = self._client.get_experiment_by_name(run.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(run.project)
        self.run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        for name, value in flat(run.config).items():
            # Older MLflow servers refuse values of more than 500 characters.
            self._client.log_param(self.run_id, _plain(name), str(value)[:500])

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.run_id, [Metric(_plain(name), value, now, step) for name, value in metrics.items()])

    def log_table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        data = {column: [row[number] for row in rows] for number, column in enumerate(columns)}
        self._client.log_table(self.run_id, data, f"{name}/step_{step:06d}.json")

    def finish(self, summary: dict[str, float], failed: bool) -> None:
        self.log(0, summary)
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


class SwanLab(Sink):
    """SwanLab tracker."""

    def __init__(self, run: RunInfo) -> None:
        import swanlab

        self._table = lambda columns, rows: swanlab.echarts.Table().add(columns, rows)
        named = {"project": run.project, "name": run.name, "config": run.config, "log_dir": str(run.folder / "swanlog")}
        resume = "allow" if run.run_id else "never"
        # SwanLab must neither prompt on the terminal nor capture it.
        quiet = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        self._run = swanlab.init(**named, id=run.run_id, resume=resume, settings=quiet)
        self.run_id = self._run.id

    def finish(self, summary: dict[str, float], failed: bool) -> None:
        self._run.config.update({"summary": summary})
        self._run.finish(**({"state": "crashed", "error": "see train.log"} if failed else {}))


class ClearML(Sink):
    """ClearML tracker. The first part of a metric's name is the title of its plot."""

    def __init__(self, run: RunInfo) -> None:
        from clearml import Task

        # By default ClearML patches argparse, frameworks and output streams of the process, and reuses the last task.
        hooks = ("auto_connect_arg_parser", "auto_connect_frameworks", "auto_connect_streams", "reuse_last_task_id")
        # An offline task was packed when it ended; continuing it hangs.
        goes_on = None if (run.run_id or "").startswith("offline-") else run.run_id
        options: dict[str, Any] = dict.fromkeys(hooks, False) | {"continue_last_task": goes_on or False}
        self._task = Task.init(project_name=run.project, task_name=run.name, **options)
        self.run_id = self._task.id
        if goes_on:
            self._task.set_initial_iteration(0)  # steps are counted from the first attempt
        else:
            self._task.connect_configuration(run.config, name="rltrain")
        self._logger = self._task.get_logger()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            self._logger.report_scalar(title, series or title, value, step)

    def log_table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self._logger.report_table(name, "table", step, table_plot=[columns, *rows])

    def finish(self, summary: dict[str, float], failed: bool) -> None:
        for name, value in summary.items():
            self._logger.report_single_value(name, value)
        if failed:
            self._task.mark_failed(status_reason="see train.log")
        self._task.close()


class Trackio(Sink):
    """Trackio tracker. A run is continued by its name."""

    def __init__(self, run: RunInfo) -> None:
        import trackio

        self._table = lambda columns, rows: trackio.Table(columns=columns, data=rows)
        name, resume = run.run_id or run.name, "allow" if run.run_id else "never"
        self._run = trackio.init(project=run.project, name=name, config=run.config, resume=resume, embed=False)
        self.run_id = self._run.name


def wandb_login_lacks() -> str:
    """Return advice on logging in to W&B; "" if there is a login or it is not needed. Contacts no server."""
    import wandb
    from requests.utils import get_netrc_auth

    settings = wandb.setup().settings
    credential = settings.api_key or getattr(settings, "identity_token_file", None) or get_netrc_auth(settings.base_url)
    if settings.mode != "online" or credential:
        return ""
    return "not logged in (run `wandb login`, or set WANDB_API_KEY)"


def wandb_refusal() -> str:
    """Return the reason why W&B would reject data now, or "". Takes seconds if its server does not respond."""
    import wandb

    if lacks := wandb_login_lacks():
        return lacks
    # By default wandb prompts on the terminal during training, and older versions do not contact the server.
    try:
        return "" if wandb.login(prompt=False, verify=True) else "not logged in"
    except (wandb.errors.Error, OSError, ValueError) as error:  # ValueError: an invalid key, in older versions
        return first_line(error).rstrip(".")


def unsent_wandb(folder: Path) -> list[Path]:
    """Return the offline wandb folders in a run folder that `wandb sync` has not marked as sent."""
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    return [file.parent for file in files if not file.with_name(f"{file.name}.synced").exists()]


TRACKERS: dict[str, type[Sink]] = {
    "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "swanlab": SwanLab, "clearml": ClearML,
    "trackio": Trackio, "vemlp_wandb": VemlpWandB,
}  # fmt: skip


def markdown_table(columns: Sequence[str], rows: Rows) -> str:
    """Return a table as Markdown, one line per row for any cell contents."""
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


def _plain(name: str) -> str:
    """Return a name with the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))
