"""``python -m rltrain.sync RUN``: send what a run's trackers have kept in the run folder.

W&B's offline files go by wandb's own command, which marks a folder that has arrived: what is marked is not sent again.
Left out: sending a run that is not over, as wandb would mark its files and pass over the rest. For other trackers the
user is told what to type.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rltrain.base.env import installed
from rltrain.base.errors import DataError, command
from rltrain.base.storage import run_folder
from rltrain.run.checkpoints.folder import Checkpoints
from rltrain.run.report.trackers import unsent_wandb, wandb_refusal
from rltrain.run.report.tracking import IDS_FILE, read_ids

# What to do for the trackers that have no files for this command, by their names in tracking.json.
_OTHERS = {
    "mlflow": "mlflow: run {id} is where MLFLOW_TRACKING_URI pointed. Of a database: mlflow ui --backend-store-uri URI",
    "swanlab": "swanlab: offline files (SWANLAB_MODE=offline) go with: swanlab sync {run}/swanlog/run-*",
    "clearml": "clearml: a task that was offline goes from Python: clearml.Task.import_offline_session(ZIP), with the "
    "file that ClearML named at its end",
    "trackio": "trackio: run {id} is on the machine that trained: trackio sync --project PROJECT --space-id USER/SPACE",
}


def send(run: Path) -> int:
    """Send what is there; returns 0, or 75 where something is left, which the same command goes on with.

    Raises DataError.
    """
    if problem := Checkpoints(str(run_folder(run))).problem():
        raise DataError(problem)
    for line in _of_others(run):
        sys.stdout.write(f"{line}\n")
    folder, waiting = run / "wandb", unsent_wandb(run)
    if not waiting:
        state = "all is sent" if any(folder.glob("offline-run-*")) else "there are no offline files of W&B"
        sys.stdout.write(f"{folder}: {state}\n")
        return 0
    if not installed("wandb"):
        raise DataError(f"{folder} has offline files, and wandb is not installed here. Try: pip install wandb")
    if why := refusal():
        raise DataError(f"W&B takes nothing now: {why}. Mend that, and run the same command again.")
    with open(folder / "sync.lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder} is being sent by another process. Wait for it.") from None
        except OSError:  # some network storage has no locks at all
            pass
        waiting = unsent_wandb(run)  # the other one may have ended meanwhile
        # Ctrl-C ends wandb, and what has arrived is told. wandb sorts the folders of one run by their time.
        with suppress(KeyboardInterrupt):
            command_line = ["env", "-u", "WANDB_MODE", sys.executable, "-m", "wandb", "sync", *map(str, waiting)]
            subprocess.run(command_line, stdin=subprocess.DEVNULL, check=False)
    left = len(unsent_wandb(run))
    sys.stdout.write(f"{len(waiting) - left} of {len(waiting)} offline folders in {folder} have arrived\n")
    if left:
        sys.stderr.write(f"error: {left} did not arrive, see above. The same command goes on with them.\n")
    return 75 if left else 0


def refusal() -> str:
    """Why W&B cannot be written to from here; empty where it can."""
    import wandb

    # WANDB_MODE=offline may still be set, as it was for the run.
    wandb.setup(wandb.Settings(mode="online"))
    return wandb_refusal()


def _of_others(run: Path) -> Iterator[str]:
    if (run / "tensorboard").is_dir():
        yield f"tensorboard: nothing to send. Look at it with: tensorboard --logdir {run / 'tensorboard'}"
    for name, run_id in read_ids(run / IDS_FILE).items():
        if name in _OTHERS:
            yield _OTHERS[name].format(id=run_id, run=run)
    if online := sorted((run / "wandb").glob("run-*")):
        yield (
            f"wandb: {online[-1]} was online, and W&B has it but for what a failure cut off. That goes with: "
            f"wandb sync --include-online {online[-1]}"
        )


@command
def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write(
            "usage: python -m rltrain.sync RUN_FOLDER\n\nSend the files that W&B's offline mode has left in "
            "RUN_FOLDER, and say what to do for other trackers.\n"
        )
        return 0 if arguments in (["-h"], ["--help"]) else 2
    return send(Path(arguments[0]))


if __name__ == "__main__":
    sys.exit(main())
