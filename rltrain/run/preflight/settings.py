"""Checks of settings before anything starts, used by runs and dry runs: problems that would end a run later."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rltrain.common.device import get_device
from rltrain.common.env import devices_here, installed
from rltrain.common.errors import RltrainError
from rltrain.common.plugin import EXTERNAL_LIB, import_libraries, is_plugin, load_plugin
from rltrain.common.versions import misfits, others
from rltrain.config.check import missing_files
from rltrain.config.loaded import LoadedConfig
from rltrain.config.notes import other_meanings
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import get, plugin_keys
from rltrain.config.step_passes import roles_of
from rltrain.run.callbacks.user import callback_problems
from rltrain.run.preflight.models import PreflightResult, check_models
from rltrain.runtime.cluster import cluster_address, ray_problems

_NAMES = {"cuda": "CUDA", "npu": "NPU"}


def preflight(loaded: LoadedConfig) -> PreflightResult:
    """Check files, packages, devices, plugins and models that the config names. Takes seconds, starts nothing."""
    cfg = loaded.config
    of_engine = [*check_packages(loaded), *_engine_arguments(cfg)]
    result = PreflightResult([*missing_files(cfg), *of_engine, *check_devices(loaded), *ray_problems(cfg.cluster)])
    if "critic" in roles_of(cfg) and "algorithm.adv_estimator" not in loaded.explicit:
        result.notes.append(
            "a critic is trained too, because algorithm.adv_estimator defaults to gae, as in verl; grpo needs no critic"
        )
    result.notes += other_meanings(loaded)
    result.notes += _chosen_engine(loaded)
    check_versions(cfg, result)
    # An error in one check does not hide the result of the other.
    for check in (_plugins, check_models):
        try:
            check(cfg, result)
        except RltrainError as error:
            result.problems.append(str(error))
    # Roles that share a model report the same problem.
    result.problems[:] = dict.fromkeys(loaded.as_written(problem, follow=False) for problem in result.problems)
    return result


def check_versions(cfg: Config, result: PreflightResult) -> None:
    """Check that the versions of the device's packages fit together."""
    device = get_device(cfg.trainer.device)
    if device.count and not device.is_cpu:  # on a login node, the packages of other nodes are unknown
        result.problems += misfits(device.kind)
        result.notes += [note for note in [others(device.kind)] if note]


def _plugins(cfg: Config, result: PreflightResult) -> None:
    # First, because a library may register names that other keys use.
    import_libraries(EXTERNAL_LIB, cfg.actor_rollout_ref.model.external_lib)
    result.problems += check_plugins(cfg)
    for key in plugin_keys():
        if is_plugin(name := get(cfg, key) or ""):
            try:
                load_plugin(key, name)
            except RltrainError as error:
                result.problems.append(str(error))


def _chosen_engine(loaded: LoadedConfig) -> Iterator[str]:
    """Yield a note on an engine that the user did not choose (on a CPU not for hf, which is expected there)."""
    config, key = loaded.config, "actor_rollout_ref.rollout.name"
    if key in loaded.explicit:
        return
    rollout, device = config.actor_rollout_ref.rollout, config.trainer.device
    if rollout.name == "vllm":
        size = rollout.tensor_model_parallel_size
        why = f"tensor_model_parallel_size={size}" if size > 1 else f"trainer.device={device}, and vLLM is installed"
        yield f"{key} is not set: vllm is used, because {why}"
    elif device != "cpu" and (device != "auto" or devices_here(device, none=0)):
        yield (
            f"{key} is not set: hf, a plain decode loop, is used, because vLLM, which is faster, is not installed. "
            f"Install {ENGINES['vllm'].install}"
        )


def check_packages(loaded: LoadedConfig) -> Iterator[str]:
    """Yield problems of packages that the settings need and that are not installed."""
    roles = loaded.config.actor_rollout_ref
    engine = ENGINES[roles.rollout.name]
    if engine.package and not installed(engine.package):
        hf = "rollout.name=hf" + (
            " with tensor_model_parallel_size=1" if roles.rollout.tensor_model_parallel_size > 1 else ""
        )
        yield (
            f"actor_rollout_ref.rollout.name={roles.rollout.name}: the package is not installed here. Install "
            f"{engine.install}, or use {hf}."
        )
    device = get_device(loaded.config.trainer.device)
    if roles.model.use_liger and device.kind == "cuda" and not installed("liger_kernel"):
        yield "actor_rollout_ref.model.use_liger=True needs Liger's kernels: pip install 'rltrain[liger]'"


def _engine_arguments(cfg: Config) -> Iterator[str]:
    """Yield problems of arguments that the installed engine does not know.

    Its source is parsed, because importing it is slow.
    """
    rollout = cfg.actor_rollout_ref.rollout
    engine = ENGINES[rollout.name]
    arguments = set(rollout.engine_kwargs.get(rollout.name) or ()) - set(engine.outdated_arguments)
    package = importlib.util.find_spec(engine.package) if arguments and engine.package else None
    file, _, name = engine.arguments.partition(":")
    source = Path(((package and package.submodule_search_locations) or [""])[0], file)
    if not (package and source.is_file()):
        return
    classes = [node for node in ast.parse(source.read_bytes()).body if isinstance(node, ast.ClassDef)]
    fields = [field for node in classes if node.name == name for field in node.body if isinstance(field, ast.AnnAssign)]
    names = [field.target.id for field in fields if isinstance(field.target, ast.Name)]
    for argument in sorted(arguments - set(names)) if names else ():
        near = difflib.get_close_matches(argument, names, n=1)
        key = f"actor_rollout_ref.rollout.engine_kwargs.{rollout.name}.{argument}"
        way_out = f"Did you mean {near[0]}?" if near else "Leave it out."
        yield f"{key}: {rollout.name}, as installed here, has no such argument. {way_out}"


def check_devices(loaded: LoadedConfig) -> Iterator[str]:
    """Yield problems of requested devices that do not exist on this node. Other nodes are not known yet."""
    trainer, address = loaded.config.trainer, cluster_address(loaded.config.cluster)
    device = get_device(trainer.device)
    # A worker takes one of Ray's slots. rltrain sets enough of them unless the user has set a number.
    name, number = f"num_{device.ray_resource.lower()}s", trainer.n_gpus_per_node
    slots = loaded.config.ray_kwargs.ray_init.get(name)
    if not address and slots is not None and slots < number:
        too_few = f"ray_kwargs.ray_init.{name}={slots} is too few for trainer.n_gpus_per_node={number} workers"
        yield f"{too_few}. Leave it out."
    if device.is_cpu:
        # The machine has accelerators that torch cannot use. An error is better than silently training on the CPU.
        if trainer.device == "auto" and devices_here("auto", none=0):
            yield (
                f"trainer.device=auto: torch {torch.__version__} sees none of the {devices_here('auto', none=0)} "
                "accelerators that this machine shows. Install a torch (and driver) for them, "
                "or set trainer.device=cpu to train on the CPU."
            )
        return
    have = f"this machine has {device.count} {_NAMES[device.kind]} devices (torch {torch.__version__})"
    # This machine may be a login node without the cluster's devices.
    if address:
        if not device.count and "trainer.n_gpus_per_node" not in loaded.explicit:
            yield f"trainer.n_gpus_per_node is not set, and {have}. Set it to the number of devices of each node."
    elif not device.count:
        yield (
            f"trainer.device={trainer.device}: {have}. Use trainer.device=cpu, or a machine and a torch that have them."
        )
    elif device.count < trainer.n_gpus_per_node:
        yield f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: {have}. Set trainer.n_gpus_per_node={device.count}."


def check_plugins(cfg: Config) -> Sequence[str]:
    """Try the user's estimators and losses on a small batch, and check callbacks. Return the problems."""
    # Imported here, so that torch is not loaded before the settings are valid.
    from rltrain.algorithms.trial import try_estimator, try_policy_loss

    trials = [*try_estimator(cfg.algorithm), *try_policy_loss(cfg.actor_rollout_ref.actor)]
    return [*trials, *callback_problems(cfg.trainer.callbacks)]
