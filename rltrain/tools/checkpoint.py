"""``python -m rltrain.checkpoint export|thin|verify RUN``: exports, thins or verifies the checkpoints of a run."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from rltrain.common.errors import CheckpointError, ConfigError, command, sanitize
from rltrain.common.storage import json_lines, run_folder
from rltrain.config.load import load_config
from rltrain.models.files.folder import new_folder
from rltrain.models.files.verl import shard_files
from rltrain.models.weights.average import DTYPES, Average, read_part, read_shards
from rltrain.run.checkpoints.best import Best
from rltrain.run.checkpoints.card import scores
from rltrain.run.checkpoints.folder import Checkpoints, RunFolder
from rltrain.run.checkpoints.foreign import describe_verl_checkpoint
from rltrain.run.checkpoints.manifest import has_digests, is_thinned, read_record, size_of
from rltrain.run.checkpoints.model_folder import complete_export, find_step
from rltrain.run.checkpoints.room import sized
from rltrain.run.checkpoints.thin import damage, optimizer_bytes, thin
from rltrain.run.report.table import METRICS
from rltrain.tools.evaluate.results import RESULT


def export(name: str, out: str, dtype: str | None = None) -> None:
    """Write the model of a checkpoint (for a run: its newest intact one) to a separate folder. dtype: dtype of the
    weights; None: unchanged (checkpoints of rltrain are then copied). Raises CheckpointError, ConfigError, DataError,
    DiskError.
    """
    place = Path(name).expanduser()
    source = next((folder for folder in (place, place / "actor") if shard_files(folder)), None)
    is_foreign, step = source is not None, None
    if source is None:
        step = find_step(place)
        if step is None:
            raise CheckpointError(f"{run_folder(place)} has no checkpoint. Name a run folder or its global_step_N.")
        source = complete_export(step)
    with new_folder(out) as folder:
        if is_foreign or dtype:
            part = read_shards(source) if is_foreign else read_part(str(source))
            Average([part], [1.0], DTYPES[dtype] if dtype else None).write(folder, {})
        else:
            shutil.copytree(source, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
        if step and (card := source / "README.md").is_file():
            metrics = scores(json_lines(step.parent / METRICS), read_record(step)["global_step"])
            (folder / card.name).write_text(card.read_text("utf-8") + metrics, "utf-8")
    sys.stdout.write(f"{source} -> {Path(out).expanduser().resolve()}\nto publish it: hf upload USER/NAME {out}\n")


def verify(name: str) -> int:
    """Verify every file of every checkpoint and print a table. Return 1 if one is damaged, else 0.

    Raises CheckpointError if there is no checkpoint.
    """
    damaged = []
    for step in _steps(name):
        problem = damage(step)
        state = f"damaged: {problem}" if problem else "whole"
        if not problem:
            state += "" if has_digests(step) else " (saved without digests: only sizes are compared)"
            state += ", without optimizer" if is_thinned(step) else ""
        sys.stdout.write(f"{step.name:<20} {sized(size_of(step)):>10}  {state}\n")
        sys.stdout.flush()
        damaged += [step.name] if problem else []
    if damaged:
        sys.stderr.write(
            sanitize(f"error: damaged in {name}: {', '.join(damaged)}. A run passes over them; copy them again.\n")
        )
    return 1 if damaged else 0


def thin_run(name: str, keep: int, *, thins_best: bool, dry: bool) -> None:
    """Remove the optimizer state from older checkpoints and print the freed space.

    keep: number of newest checkpoints to leave unchanged. Raises CheckpointError, DiskError, and ConfigError if the run
    is active.
    """
    if keep < 0:
        raise ConfigError(f"--keep {keep}: give 0 or more.")
    list(_steps(name))  # raises an error before a lock file is created in a folder without checkpoints
    run = RunFolder(name)
    try:
        whole = [step for step in run.steps() if not run.damage(run.step_folder(step))]
        best = None if thins_best else _best(run, whole)
        freed = 0
        for step in run.steps():
            folder = run.step_folder(step)
            if step not in whole:
                status = "damaged: unchanged"
            elif is_thinned(folder):
                status = "already thinned"
            elif step in whole[max(0, len(whole) - keep) :]:
                status = "stays (--keep)"
            elif step == best:
                status = "kept (best by trainer.keep_best; --best thins it too)"
            else:
                num_bytes = optimizer_bytes(folder) if dry else thin(run, step)
                freed += num_bytes
                status = f"{'would free' if dry else 'freed'} {sized(num_bytes)}"
            sys.stdout.write(f"{folder.name:<20} {sized(size_of(folder)):>10}  {status}\n")
            sys.stdout.flush()
        sys.stdout.write(f"{'would free' if dry else 'freed'} {sized(freed)} in all\n")
    finally:
        run.release()


def _best(run: Checkpoints, whole: Iterable[int]) -> int | None:
    """Return the step that ``trainer.keep_best`` keeps. Raises ConfigError if the run's configuration is invalid."""
    file = run.path / "config.yaml"
    if not file.is_file():
        return None
    trainer = load_config([], [str(file)]).config.trainer
    return Best(trainer, run.path / "metrics.jsonl", max(whole, default=0)).of(whole)


def _steps(name: str) -> list[Path]:
    folder = Path(name).expanduser()
    if (folder / "manifest.json").is_file() or folder.name.startswith("global_step_"):
        found = [folder] if folder.is_dir() else []
    else:
        run = Checkpoints(name)
        found = [run.step_folder(step) for step in run.steps()]
    if not found:
        raise CheckpointError(f"{run_folder(folder)} has no checkpoint (global_step_N). Name a run folder.")
    for step in found:
        if (step / RESULT).is_file():
            raise CheckpointError(f"{step} has an evaluation of a checkpoint, but no weights. Name the run folder.")
        if foreign := describe_verl_checkpoint(step):
            raise CheckpointError(f"{step}: {foreign}.")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rltrain checkpoint", description="Work on checkpoints of a run.")
    programs = parser.add_subparsers(dest="program", required=True, metavar="PROGRAM")
    exporting = programs.add_parser("export", help="copy the model of a checkpoint to a folder")
    exporting.add_argument(
        "run",
        metavar="RUN",
        help="a run folder (its newest complete checkpoint), its global_step_N, or global_step_N/actor of verl's",
    )
    exporting.add_argument("out", metavar="OUT", help="the folder to create")
    exporting.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: unchanged)")
    thinning = programs.add_parser("thin", help="remove the optimizer state of older checkpoints")
    thinning.add_argument("run", metavar="RUN", help="a run folder")
    thinning.add_argument(
        "--keep", type=int, default=1, metavar="N", help="number of newest checkpoints that are not changed (default 1)"
    )
    thinning.add_argument("--best", action="store_true", help="also thin the best checkpoint by trainer.keep_best")
    thinning.add_argument("--dry-run", action="store_true", help="show what would be freed, and change nothing")
    verifying = programs.add_parser("verify", help="compare all files of checkpoints with their digests")
    verifying.add_argument("run", metavar="RUN", help="a run folder or its global_step_N")
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.program == "verify":
        return verify(arguments.run)
    if arguments.program == "thin":
        thin_run(arguments.run, arguments.keep, thins_best=arguments.best, dry=arguments.dry_run)
    else:
        export(arguments.run, arguments.out, arguments.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
