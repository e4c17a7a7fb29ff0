"""Keys the user set that change nothing in the chosen mode, and why.

Most of it is said at the fields themselves: the conditions of `fields.Rules.only_with`, in a small language that
`holds` reads. What is left here are the few facts that a table holds already (engines, declarations of estimators and
losses), and those that compare values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rltrain.config.budgets import unused_sizes
from rltrain.config.loaded import LoadedConfig
from rltrain.config.schema import Config
from rltrain.config.schema.declarations import ESTIMATORS, POLICY_LOSSES, estimator_traits, loss_traits
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import all_keys, free_form_parent, get
from rltrain.config.step_passes import make_step_passes, needs_all_old_log_probs
from rltrain.config.verl.renames import shown

_A = "actor_rollout_ref."
_OFF_AT_ZERO = ("_coef", "critic_warmup")
_WITHOUT = ": no effect: "
_ATOM = re.compile(r"(?P<path>[\w.]+)(?:(?P<operator>!=|=|<|>)(?P<values>.+))?")


def without_effect(loaded: LoadedConfig) -> list[str]:
    """One line for each key the user set that changes nothing in the chosen mode."""
    notes: dict[str, str] = {}
    for source in (
        _not_read,
        _unused_by_engine,
        _given_adapter,
        _one_copy,
        _own_attention,
        _whole_pass,
        _whole_checkpoints,
        _nothing_early,
        _conditions,
        lambda loaded: unused_sizes(loaded.config),
    ):
        # The first reason wins, so general ones come late; which size decides matters only in a pass that is made.
        for key, why in source(loaded):
            # Nobody misses what is 0: scripts turn a KL off in all its places.
            off = key.endswith(_OFF_AT_ZERO) and get(loaded.config, key) == 0
            if (key in loaded.explicit or free_form_parent(key) in loaded.explicit) and not off:
                notes.setdefault(key, f"{key}{_WITHOUT}{why}")
    return [notes[key] for key in sorted(notes)]


def together(notes: Sequence[str]) -> list[str]:
    """One line for all keys that are without effect for the same reason; another spelling of such a key is no news."""
    lines: dict[str, list[str]] = {}
    for note in notes:
        keys, without, why = note.partition(_WITHOUT)
        lines.setdefault(why if without else note, []).extend([keys] if without else [])
    dead = {key for keys in lines.values() for key in keys}
    return [
        f"{', '.join(keys)}{_WITHOUT}{why}" if keys else why
        for why, keys in lines.items()
        if keys or why.partition(" is called ")[0] not in dead
    ]


def holds(config: Config, scope: str, condition: str) -> bool:
    """Whether a condition holds that stands in the section ``scope``.

    It is "a or b or …" of: ``key`` (set, and not False), ``key=value|value``, ``key!=value|value``, ``key<number``,
    ``key>number``. A key is looked up in ``scope``, then in the sections around it.
    """
    return any(_atom_holds(config, scope, atom) for atom in condition.split(" or "))


def _atom_holds(config: Config, scope: str, atom: str) -> bool:
    path, operator, values = _parts(atom)
    value = get(config, _full(config, scope, path))
    if not operator:
        return bool(value)
    if operator in "<>":
        return value < float(values) if operator == "<" else value > float(values)
    return (shown(value) in values.split("|")) == (operator == "=")


def _parts(atom: str) -> tuple[str, str, str]:
    found = _ATOM.fullmatch(atom)
    assert found, atom
    return found["path"], found["operator"] or "", found["values"] or ""


def _full(config: Config, scope: str, path: str) -> str:
    """The whole name of the key that ``path`` means in a section."""
    section = scope
    # Outwards, so that a condition reads as in its own section and may still name a key anywhere.
    while not hasattr(get(config, section), path.partition(".")[0]):
        assert section, f"{path} is not known in {scope}"
        section = section.rpartition(".")[0]
    return f"{section}.{path}".lstrip(".")


def _conditions(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    for key in loaded.explicit:
        for scope, condition, why in all_keys()[free_form_parent(key) or key].only_with:
            if not holds(loaded.config, scope, condition):
                yield key, why or _failed(loaded.config, scope, condition)
                break


def _failed(config: Config, scope: str, condition: str) -> str:
    """The values on which a condition failed, and where the key would count."""
    atoms = [_parts(atom) for atom in condition.split(" or ")]
    keys = dict.fromkeys(_full(config, scope, path) for path, _, _ in atoms)
    values = " and ".join(f"{key}={shown(get(config, key))}" for key in keys)
    if not any(operator for _, operator, _ in atoms):
        return values
    return f"{values}; it counts with {condition.replace('|', ' or ')}"


def _not_read(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Keys that other estimators or losses read, but not the chosen one."""
    algorithm, actor = loaded.config.algorithm, loaded.config.actor_rollout_ref.actor
    estimator, loss = algorithm.adv_estimator, actor.policy_loss.loss_mode
    for section, table, chosen, name in (
        ("algorithm.", ESTIMATORS, estimator_traits(estimator), f"adv_estimator={estimator}"),
        (_A + "actor.", POLICY_LOSSES, loss_traits(loss), f"loss_mode={loss}"),
    ):
        # A function of the user's own may read any key, so nothing is said of it.
        every = {key for traits in table.values() for key in traits.reads or ()}
        for key in every - set(every if chosen.reads is None else chosen.reads):
            readers = " or ".join(each for each, traits in table.items() if key in (traits.reads or ()))
            yield f"{section}{key}", f"{name} does not read it, only {readers}"


def _unused_by_engine(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Keys that the chosen engine does not read, and arguments of other engines."""
    name, section = loaded.config.actor_rollout_ref.rollout.name, _A + "rollout."
    own = f"{section}engine_kwargs.{name}."
    for key in loaded.explicit:
        if (free_form_parent(key) or key).removeprefix(section) in ENGINES[name].unused_keys:
            yield key, f"the engine is rollout.name={name}"
        elif key.startswith(section + "engine_kwargs.") and not key.startswith(own):
            yield key, f"the engine is rollout.name={name}, whose arguments are {own.rstrip('.')}"
        elif key.startswith(own) and key.removeprefix(own).partition(".")[0] in ENGINES[name].outdated_arguments:
            yield key, f"{name} has no such argument any more"


def _given_adapter(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    if loaded.config.actor_rollout_ref.model.lora_adapter_path is not None:
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
            yield f"{_A}model.{name}", "lora_adapter_path brings rank, scale and layers"


def _one_copy(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    trainer, size = loaded.config.trainer, loaded.config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    if size >= trainer.nnodes * trainer.n_gpus_per_node:
        yield f"{_A}actor.fsdp_config.fsdp_size", "all devices share one copy of the weights anyway"


def _own_attention(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    for model in (_A + "model", "critic.model"):
        if "attn_implementation" in get(loaded.config, model).override_config:
            yield (
                f"{model}.override_config.attn_implementation",
                "attention is always over packed sequences, in our code",
            )


def _whole_pass(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    if loaded.config.algorithm.rollout_correction.bypass_mode or needs_all_old_log_probs(loaded.config):
        yield f"{_A}actor.recompute_old_log_prob", "this mode needs the whole pass, or none"


def _nothing_early(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    config, passes = loaded.config, make_step_passes(loaded.config)
    whole = config.data.train_batch_size <= config.actor_rollout_ref.actor.ppo_mini_batch_size
    if not passes.ref and passes.old_log_probs in ("none", "all but the first mini-batch" if whole else ""):
        yield "trainer.overlap", "a step of this run has no log-prob pass beside the update's own"
    elif (
        config.actor_rollout_ref.rollout.tensor_model_parallel_size
        == config.trainer.nnodes * config.trainer.n_gpus_per_node
    ):
        yield "trainer.overlap", "all devices are one engine, which has its answers at once"


def _whole_checkpoints(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    kept = set(loaded.config.actor_rollout_ref.actor.checkpoint.save_contents)
    if left_out := sorted({"model", "optimizer", "extra"} - kept):
        why = f"{', '.join(left_out)} left out, but always saved, so that every checkpoint can be resumed"
        yield f"{_A}actor.checkpoint.save_contents", why
