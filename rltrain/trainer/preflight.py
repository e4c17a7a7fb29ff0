"""What would make a run end later, seen before anything starts: one function that a run and a dry run both ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rltrain.config.check import missing_files
from rltrain.config.engines import ENGINES
from rltrain.config.keys import get, plugin_keys
from rltrain.config.load import LoadedConfig
from rltrain.config.meanings import other_meanings
from rltrain.config.schema import Config
from rltrain.controller.cluster import cluster_address, ray_problems
from rltrain.data.chat import chat_encoder
from rltrain.device import get_device
from rltrain.env import devices_here, installed
from rltrain.errors import RltrainError
from rltrain.models.load import empty_model, load_config
from rltrain.models.lora import adapter_size, lora_of
from rltrain.models.source import model_problem
from rltrain.plugin import is_plugin, load_plugin
from rltrain.trainer.advantage import check_plugins

_NAMES = {"cuda": "CUDA", "npu": "NPU"}


@dataclass
class Findings:
    """problems: a run refuses. notes: it starts, but someone may want to know."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tokenizer_works: bool = False
    num_parameters: int = 0
    num_trained: int = 0


def preflight(loaded: LoadedConfig) -> Findings:
    """Files, packages, devices, plugins and models that the config names. Takes a few seconds; starts nothing."""
    cfg = loaded.config
    found = Findings([*missing_files(cfg), *_packages(loaded), *_devices(loaded), *ray_problems(cfg)])
    if cfg.algorithm.needs_critic and "algorithm.adv_estimator" not in loaded.explicit:
        found.notes.append(
            "a critic is trained beside the actor, as algorithm.adv_estimator is gae unless set (as in verl); "
            "grpo needs none"
        )
    found.notes += other_meanings(loaded)
    found.notes += _chosen_engine(loaded)
    # One check's error does not hide what the other finds.
    for check in (_plugins, _models):
        try:
            check(cfg, found)
        except RltrainError as error:
            found.problems.append(str(error))
    return found


def _plugins(cfg: Config, found: Findings) -> None:
    found.problems += check_plugins(cfg)
    for key in plugin_keys():
        if is_plugin(name := get(cfg, key) or ""):
            load_plugin(key, name)


def _models(cfg: Config, found: Findings) -> None:
    """Folders, weights, the layers that LoRA names, positions, and the chat template."""
    roles, critic, judge = cfg.actor_rollout_ref, cfg.critic.model, cfg.reward_model
    paths = {"actor_rollout_ref.model.path": roles.model.path}
    paths |= {"critic.model.path": critic.path} if cfg.algorithm.needs_critic and critic.path else {}
    paths |= {"reward_model.model.path": judge.model.path} if judge.enable and judge.model.path else {}
    wrong = {key: problem for key, path in paths.items() if (problem := model_problem(key, path))}
    found.problems += wrong.values()
    if "actor_rollout_ref.model.path" in wrong:
        return
    encoder = chat_encoder(cfg)
    # The dry run asks this before it reads and tokenises rows.
    found.tokenizer_works = bool(encoder.tokenizer)  # or it raises
    if encoder.ignores_generation_prompt:
        found.notes.append(
            f"the chat template of {roles.model.path} writes the same with and without add_generation_prompt, "
            "so the model is not told that it is its turn. "
            "If rewards stay low, see actor_rollout_ref.model.custom_chat_template."
        )
    config = load_config(
        roles.model.path, trust_remote_code=roles.model.trust_remote_code, override=dict(roles.model.override_config)
    )
    found.problems += _positions(cfg, config, found)
    # A model without memory behind its weights: parameters can be counted and LoRA's names matched before anything is
    # loaded.
    model = empty_model(config, "eager", torch.float32, trust_remote_code=roles.model.trust_remote_code)
    found.num_parameters = sum(weight.numel() for weight in model.parameters())
    lora = lora_of(roles.model, "actor_rollout_ref.model", torch.float32, seed=0)
    found.num_trained = adapter_size(model, lora) if lora else found.num_parameters


def _positions(cfg: Config, config: Any, found: Findings) -> Iterator[str]:
    """Sequences longer than the positions that the model knows: vLLM refuses, elsewhere it is the user's to decide."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    rollout, data = cfg.actor_rollout_ref.rollout, cfg.data
    longest = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    if limit and longest > limit:
        said = (
            f"data.max_prompt_length + data.max_response_length = {longest:,} tokens, "
            f"and the model knows {limit:,} positions"
        )
        if not ENGINES[rollout.name].beyond_positions:
            yield (
                f"{said}, which {rollout.name} refuses. "
                "Shorten one, or raise model.override_config.max_position_embeddings."
            )
        else:
            found.notes.append(f"{said}: longer ones are beyond what it was trained for")


def _chosen_engine(loaded: LoadedConfig) -> Iterator[str]:
    """An engine that the user has not named. On a CPU hf is what one expects."""
    config, key = loaded.config, "actor_rollout_ref.rollout.name"
    if key in loaded.explicit:
        return
    rollout, device = config.actor_rollout_ref.rollout, config.trainer.device
    if rollout.name == "vllm":
        size = rollout.tensor_model_parallel_size
        why = f"tensor_model_parallel_size={size}" if size > 1 else f"trainer.device={device}, and vLLM is installed"
        yield f"{key} is not set: vllm, as {why}"
    elif device != "cpu" and (device != "auto" or devices_here(device, none=0)):
        yield (
            f"{key} is not set: hf, a plain decode loop, as vLLM, the engine for speed, is not installed here. "
            f"Install {ENGINES['vllm'].install}"
        )


def _packages(loaded: LoadedConfig) -> Iterator[str]:
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
    if (roles.model.uses_lora or loaded.config.critic.model.uses_lora) and not installed("peft"):
        yield "LoRA (model.lora_rank) needs peft, which is not installed here: pip install 'rltrain[lora]'."


def _devices(loaded: LoadedConfig) -> Iterator[str]:
    """Devices that are asked for and not there. Of other nodes nothing is known yet."""
    trainer, address = loaded.config.trainer, cluster_address(loaded.config)
    device = get_device(trainer.device)
    if device.is_cpu:
        # A worker takes one CPU slot; rltrain chooses enough of them unless the user has set a number.
        slots = loaded.config.ray_kwargs.ray_init.get("num_cpus")
        # The machine shows accelerators that torch cannot use. To train on the CPU without a word would be the worst
        # answer.
        if trainer.device == "auto" and devices_here("auto", none=0):
            yield (
                f"trainer.device=auto: torch {torch.__version__} sees none of the {devices_here('auto', none=0)} "
                "accelerators that this machine shows. Install a torch (and driver) for them, "
                "or set trainer.device=cpu to train on the CPU."
            )
        if not address and slots is not None and slots < trainer.n_gpus_per_node:
            yield (
                f"ray_kwargs.ray_init.num_cpus={slots} is too few for "
                f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} workers. Leave it out."
            )
        return
    here = f"this machine has {device.count} {_NAMES[device.kind]} devices (torch {torch.__version__})"
    # This machine may be a login node, so its devices say nothing about the cluster's.
    if address:
        if not device.count and "trainer.n_gpus_per_node" not in loaded.explicit:
            yield f"trainer.n_gpus_per_node is not set, and {here} to count. Say how many each node has."
    elif not device.count:
        yield (
            f"trainer.device={trainer.device}: {here}. Use trainer.device=cpu, or a machine and a torch that have them."
        )
    elif device.count < trainer.n_gpus_per_node:
        yield f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: {here}. Set trainer.n_gpus_per_node={device.count}."
