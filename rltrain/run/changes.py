"""Changed settings of a resumed run: they are logged, and the old config files are kept.

Most keys may change between two starts. A few keys turn the later steps into a different experiment. Such a run is
refused if it has no explicit name, because then it probably resumes by accident.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rltrain.common.errors import ConfigError
from rltrain.common.storage import patiently
from rltrain.config.load import to_dict, to_yaml
from rltrain.config.loaded import LoadedConfig
from rltrain.config.schema.declarations import LOSS_KEY, POLICY_LOSSES, LossTraits
from rltrain.config.schema.keys import all_keys
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.resume import ResumePoint
from rltrain.runtime.cluster import ray_logs
from rltrain.tools.env import device_facts, facts
from rltrain.trainer.plan import Plan

log = logging.getLogger(__name__)

_NAMES = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir")
_ACTOR = "actor_rollout_ref.actor."
# Keys that define the experiment. If one changes, the later steps belong to another experiment.
_EXPERIMENT = (
    "algorithm.",
    "custom_reward_function.",
    "reward.weights",
    *(f"reward.judge.{name}" for name in ("model", "prompt", "parse", "rule", "images", "request")),
    "reward_model.",
    *(
        _ACTOR + name
        for name in (
            "policy_loss.",
            "router_replay.",
            "router_aux_loss_coef",
            "router_bias_update_rate",
            "clip_ratio",
            "loss_",
            "kl_loss_",
            "use_kl_loss",
            "entropy_coeff",
            "adaptive_entropy.",
            "top_entropy_quantile",
            "off_policy_mask_threshold",
            "use_bias_correction_kl",
            "tau_",
        )
    ),
)
# Keys that do not change what a step computes.
_AROUND = ("trainer.", "ray_kwargs.")
_MISSING = object()


def log_changes(loaded: LoadedConfig, start: ResumePoint) -> list[str]:
    """Log the settings that changed since the last start. Return the changes that affect training.

    Raises ConfigError if the experiment has changed and the run has no explicit name.
    """
    # A run that starts from weights only is a new run, so there is nothing to compare. An evaluation has no training
    # steps.
    if start.folder is None or start.weights_only or loaded.config.trainer.val_only:
        return []
    changes = {key: f"{key}: {then} -> {now}" for key, then, now in changed_settings(start.folder.parent, loaded)}
    if not changes:
        return []
    of_experiment = [text for key, text in changes.items() if key.startswith(_EXPERIMENT)]
    # An explicit name or path shows intent; without one, unrelated runs share the default folder.
    if of_experiment and loaded.config.trainer.resume_mode == "auto" and not loaded.explicit & set(_NAMES):
        raise ConfigError(
            f"{start.folder.parent} has {start.step} steps of another experiment ({'; '.join(of_experiment)}), "
            "and this run would resume from there, because neither run has a name. Name the new one with "
            "trainer.experiment_name=…, or resume anyway with "
            f"trainer.experiment_name={loaded.config.trainer.experiment_name}."
        )
    log.info(
        "settings that changed since this run was last started:\n%s",
        "\n".join(f"  {line}" for line in changes.values()),
    )
    if of_experiment:
        log.warning(
            "the %d steps so far are of another experiment than the following ones (%s). To start a new run, set "
            "another trainer.default_local_dir.",
            start.step,
            "; ".join(of_experiment),
        )
    return [text for key, text in changes.items() if not key.startswith(_AROUND)]


def log_finished(run: Path, num_steps: int, changes: list[str]) -> None:
    """Log that the run has completed all its steps. changes: settings that differ from these steps' settings."""
    log.info(
        "nothing left to do: the run has its %d steps (trainer.total_training_steps, trainer.total_epochs), in %s",
        num_steps,
        run,
    )
    if changes:
        log.warning(
            "these steps were trained with other settings than those of this command (%s). To start a new run, set "
            "another trainer.default_local_dir.",
            "; ".join(changes),
        )


def write_config(run: RunFolder, loaded: LoadedConfig) -> None:
    """Write config.yaml with masked secrets."""
    _write(run, "config.yaml", to_yaml(loaded.config))


def _write(run: RunFolder, name: str, text: str) -> None:
    """Write a file of the run. A file with other content is kept as name.1.yaml, name.2.yaml and so on."""
    file = run.path / name
    with suppress(FileNotFoundError):
        if patiently(file, file.read_bytes) != text.encode():
            number = 1
            # Renamed, never overwritten: the settings of earlier steps must stay available.
            while (earlier := run.path / f"{file.stem}.{number}{file.suffix}").exists():
                number += 1
            os.rename(file, earlier)
    run.write(name, text)


def changed_settings(run: Path, loaded: LoadedConfig) -> list[tuple[str, Any, Any]]:
    """Return (key, old value, new value) of each difference to the config.yaml of ``run``.

    Keys that the old file does not have count only if they are set now.
    """
    try:
        before = OmegaConf.load(run / "config.yaml")
    # A missing or damaged record does not prevent the run.
    except (OSError, YAMLError, OmegaConfBaseException):
        return []
    now = OmegaConf.create(to_dict(loaded.config))
    changes = []
    for key in all_keys():
        earlier, current = (_effective_value(settings, key) for settings in (before, now))
        # If a newer version has added the key, the old run used its default. So it counts as changed only if it is set
        # now.
        if earlier != current and (earlier is not _MISSING or key in loaded.explicit):
            changes.append((key, "(not known)" if earlier is _MISSING else earlier, current))
    return changes


def _effective_value(tree: Any, key: str) -> Any:
    """Return the value of a key. A ``loss_agg_mode`` that is null counts as the default of its loss, which earlier
    versions wrote to the file.
    """
    value = OmegaConf.select(tree, key, default=_MISSING)
    if value is not None or not key.endswith(".loss_agg_mode"):
        return value
    loss = OmegaConf.select(tree, LOSS_KEY) if key.startswith(_ACTOR) else None
    return POLICY_LOSSES.get(loss or "vanilla", LossTraits()).aggregation


def write_run_files(folder: RunFolder, loaded: LoadedConfig, plan: Plan, hosts: list[str]) -> None:
    """Write config.yaml (with masked secrets), plan.json and env.json. hosts: the workers' hosts."""
    write_config(folder, loaded)
    _write(folder, "plan.json", json.dumps(asdict(plan), indent=1, default=str))
    ours = {"hosts": hosts, "ray_logs": ray_logs(), "started_in": os.getcwd()}
    _write(folder, "env.json", json.dumps(facts() | device_facts() | ours, indent=1))
