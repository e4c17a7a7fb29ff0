"""``python -m rltrain.main_ppo key=value ...``: parse, check, run."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any, NoReturn

from rltrain import __version__
from rltrain.errors import ConfigError, Interrupted, RltrainError
from rltrain.help import help_text
from rltrain.stop import Stop, listen

log = logging.getLogger("rltrain.main_ppo")


class _Parser(argparse.ArgumentParser):
    """Flags. What does not fit is an error as any other."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("-h", "--help", nargs="?", const="", metavar="SECTION")
        self.add_argument("--config", action="append", default=[], metavar="FILE")
        for flag in ("--version", "--print-config", "--dry-run"):
            self.add_argument(flag, action="store_true")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See --help.")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; see errors.py for what each means."""
    with listen() as stop:
        try:
            return _run(_parse(sys.argv[1:] if argv is None else argv), stop)
        except BaseException as error:
            # Ray makes errors of its own of what a signal handler raises.
            ours = stop.interrupted() if stop.at_once else error
            if not isinstance(ours, RltrainError):
                raise
        sys.stdout.flush()
        sys.stderr.write(_message(ours))
        return ours.exit_code


def _message(error: RltrainError) -> str:
    """What the terminal shows. A run that somebody stopped is no error."""
    first = "" if isinstance(error, Interrupted) else "error: "
    return first + "\n       ".join(str(error).splitlines()) + "\n"


def _run(arguments: argparse.Namespace, stop: Stop) -> int:
    if arguments.help is not None:
        _write(help_text(arguments.help))
        return 0
    if arguments.version:
        from rltrain.env_report import short_facts

        _write(short_facts() + "\n")
        return 0
    from rltrain.config.check import check, missing_files, unavailable
    from rltrain.config.effects import without_effect
    from rltrain.config.load import load_config, to_yaml

    loaded = load_config(arguments.overrides, arguments.config)
    if arguments.print_config:
        _write(to_yaml(loaded.config))
        return 0
    check(loaded)
    does_not_fit = unavailable(loaded.config)
    missing = missing_files(loaded.config)
    notes = [*loaded.warnings, *without_effect(loaded)]
    if arguments.dry_run:
        _write(_dry_run(loaded.config, notes, does_not_fit, missing))
        return 0
    if problems := [*does_not_fit, *missing]:
        raise ConfigError("\n".join(problems))
    from rltrain import logs

    with logs.session():
        trainer, model = loaded.config.trainer, loaded.config.actor_rollout_ref.model.path
        devices = logs.count(trainer.nnodes * trainer.n_gpus_per_node, "device")
        folder = os.path.abspath(os.path.expanduser(trainer.default_local_dir))
        log.info("rltrain %s: %s on %s (%s); run folder %s", __version__, model, devices, trainer.device, folder)
        for note in notes:
            log.warning("note: %s", note)
        from rltrain.trainer.run import run_training

        return run_training(loaded, stop)


# How many rows of each file --dry-run looks at; `python -m rltrain.data_preprocess.lint` looks at all.
_LINTED_ROWS = 100


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as head has seen enough; nothing must be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(argv: list[str]) -> argparse.Namespace:
    """The flags; what is left are ``overrides``."""
    arguments, rest = _Parser().parse_known_args(argv)
    for word in rest:
        if word.startswith(("--config-path", "--config-name", "--config-dir", "--cfg", "--multirun")):
            raise ConfigError(
                f"{word} is Hydra's, which is not used here. Put settings in a YAML file and give --config FILE (repeatable)."
            )
        if word.startswith("-"):
            raise ConfigError(
                f"unknown flag {word}. Flags: --help, --version, --print-config, --dry-run, --config FILE; settings are key=value."
            )
    arguments.overrides = rest
    return arguments


def _dry_run(config: Any, notes: list[str], does_not_fit: list[str], missing: list[str]) -> str:
    from rltrain.config.check import as_list
    from rltrain.trainer.plan import describe, make_plan

    prompts = None
    if not any(line.startswith("data.train_files") for line in missing):
        rows, limit = _count_rows(as_list(config.data.train_files)), config.data.train_max_samples
        prompts = min(rows, limit) if limit >= 0 else rows
    parts = [describe(make_plan(config, prompts), config)]
    if prompts is not None and config.data.filter_overlong_prompts:
        parts.append("  (prompts are counted before filter_overlong_prompts: a run may have fewer)")
    for title, lines in (
        ("no effect", notes),
        ("does not fit this version (a run would refuse)", does_not_fit),
        ("missing here (a run would refuse)", missing),
    ):
        if lines:
            parts.append(title + "\n" + "\n".join(f"  {line}" for line in lines))
    if not missing:
        parts.append(_first_rows(config))
    return "\n".join(parts) + "\n"


def _first_rows(config: Any) -> str:
    """What the linter says of the first rows of every file, with the tokenizer where the model is a local folder."""
    from rltrain.config.check import as_list
    from rltrain.data.chat import chat_encoder
    from rltrain.data_preprocess.lint import describe, lint
    from rltrain.errors import RltrainError
    from rltrain.rewards.registry import CustomReward

    data, custom = config.data, config.custom_reward_function
    batch = config.reward_model.reward_manager == "batch"
    local = os.path.isdir(config.actor_rollout_ref.model.path)
    files = [*as_list(data.train_files), *as_list(data.val_files)]
    try:
        num_rows, findings = lint(
            files,
            encoder=chat_encoder(config) if local else None,
            max_prompt_length=data.max_prompt_length if local and not data.filter_overlong_prompts else None,
            custom=CustomReward(custom.path, custom.name, dict(custom.reward_kwargs), batch) if custom.path else None,
            max_rows=_LINTED_ROWS,
        )
    except RltrainError as error:
        return f"data: {error}"
    said = describe(findings).rstrip("\n")
    return f"data: the first {num_rows} rows (up to {_LINTED_ROWS} of each file)" + (
        f"\n{said}" if said else ", nothing found"
    )


def _count_rows(files: list[str]) -> int:
    """Rows before filtering, from the files' footers."""
    import pyarrow.parquet as pq

    try:
        return sum(pq.ParquetFile(file).metadata.num_rows for file in files)
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.train_files={files}: not readable as parquet: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
