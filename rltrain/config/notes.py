"""Notes on keys of the schema: keys without effect in the chosen mode, and keys that differ in meaning from verl.

Most keys without effect are declared at the fields (`fields.Rules.only_with`). The conditions here follow from other
tables (engines, declarations of estimators and losses) or from comparing values. docs/from-verl.md lists all
differences from verl; the ones here are reported by a command. Notes on keys that the schema lacks come from
`verl.keys`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rltrain.config.budgets import unused_sizes
from rltrain.config.loaded import LoadedConfig
from rltrain.config.schema import Config
from rltrain.config.schema.conditions import as_text, is_met, unmet
from rltrain.config.schema.declarations import (
    ESTIMATORS,
    LOSS_KEY,
    POLICY_LOSSES,
    TOKEN_MEAN,
    estimator_traits,
    loss_traits,
)
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import all_keys, free_form_parent, get
from rltrain.config.step_passes import needs_all_old_log_probs
from rltrain.config.verl.table import rows

_A = "actor_rollout_ref."
_OFF_AT_ZERO = ("_coef", "critic_warmup")
_WITHOUT = ": no effect: "
# Value of clip_ratio_low and clip_ratio_high in verl's config files, which override clip_ratio.
_VERL_CLIP = 0.2


def without_effect(loaded: LoadedConfig) -> list[str]:
    """Return one line for each key the user set that changes nothing in the chosen mode."""
    notes = unused_keys(loaded)
    return [notes[key] for key in sorted(notes)]


def unused_keys(loaded: LoadedConfig) -> dict[str, str]:
    """Return the keys the user set that change nothing in the chosen mode, each with its line."""
    notes: dict[str, str] = {}
    for source in (
        _not_read,
        _unused_by_engine,
        _decided_by_others,
        _conditions,
        lambda loaded: unused_sizes(loaded.config),
    ):
        # The first reason wins, so general reasons are last. `unused_sizes` is the last one, because a size matters
        # only in a pass that runs.
        for key, why in source(loaded):
            # No note for 0, because scripts that disable a KL set all its keys to 0.
            off = key.endswith(_OFF_AT_ZERO) and get(loaded.config, key) == 0
            if (key in loaded.explicit or free_form_parent(key) in loaded.explicit) and not off:
                notes.setdefault(key, f"{key}{_WITHOUT}{why}")
    return notes


def join_by_reason(notes: Sequence[str]) -> list[str]:
    """Return one line for all keys that have no effect for the same reason.

    Notes on other spellings of such keys are dropped.
    """
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


def compares_nothing(config: Config) -> bool:
    """Return whether the advantage is the score, because a prompt has only one response."""
    takes_one = config.algorithm.estimator.takes_one and config.learns_from_rewards
    return takes_one and config.actor_rollout_ref.rollout.n < 2


def other_meanings(loaded: LoadedConfig) -> Iterator[str]:
    """Yield one line for each key the user set that makes a run learn differently than in verl."""
    actor = loaded.config.actor_rollout_ref.actor
    if compares_nothing(loaded.config):
        estimator = f"algorithm.adv_estimator={loaded.config.algorithm.adv_estimator}"
        yield (
            f"actor_rollout_ref.rollout.n=1: ONE RESPONSE PER PROMPT, SO {estimator} COMPARES NOTHING: the advantage "
            "is the score itself, as in verl. Set actor_rollout_ref.rollout.n=8 to compare responses"
        )
    if (
        loaded.config.algorithm.estimator.per_turn
        and not loaded.config.actor_rollout_ref.rollout.multi_turn.environment
    ):
        yield (
            f"algorithm.adv_estimator={loaded.config.algorithm.adv_estimator} divides the score of a response among "
            "its turns by the rewards that tools return; without such rewards the last turn gets all of it"
        )
    rollout = loaded.config.actor_rollout_ref.rollout
    for name, off in (("min_p", 0), ("repetition_penalty", 1)):
        if (value := getattr(rollout, name)) != off:
            yield (
                f"{_A}rollout.{name}={value:g}: responses are sampled from a different distribution than the one being "
                "trained, as with top_p: log-probs, ratio and KL are computed without it"
                + ("; verl 0.7 to 0.9 always generate with 1" if name == "repetition_penalty" else "")
            )
    yield from _of_loss(loaded)
    yield from _of_rows(loaded)
    clips = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
    written = {name for name in clips if f"{_A}actor.{name}" in loaded.explicit}
    if written == {"clip_ratio"} and actor.clip_ratio != _VERL_CLIP:
        yield (
            f"{_A}actor.clip_ratio={actor.clip_ratio}: it is both bounds of the clip; verl keeps them at {_VERL_CLIP} "
            "unless clip_ratio_low and clip_ratio_high are set"
        )


def _of_loss(loaded: LoadedConfig) -> Iterator[str]:
    """Yield notes on the aggregation and mode of the policy loss."""
    actor, correction = loaded.config.actor_rollout_ref.actor, loaded.config.algorithm.rollout_correction
    loss, mode, version = actor.policy_loss.loss_mode, actor.loss_agg_mode, loaded.config.trainer.verl_version
    own = loss_traits(loss).aggregation
    if mode and own not in (mode, TOKEN_MEAN):
        verl = {"gspo": "verl before 0.9", "sapo": "verl", "geo_mean": "verl"}.get(loss, "")
        if loss == "gspo" and version in ("0.5", "0.7"):
            yield f"{_A}actor.loss_agg_mode={mode}: not read, as in verl {version}: loss_mode=gspo takes {own}"
        elif loss != "gspo" or not version:
            yield (
                f"{_A}actor.loss_agg_mode={mode}: used as set, although loss_mode={loss} is defined with "
                f"{own}{verl and f', and {verl} ignores this key'}. Leave it out to use {own}."
            )
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and loss != "vanilla":
        yield (
            f"{LOSS_KEY}={loss}: its ratio is computed against the engine. bypass_mode keeps it, as verl's workers do; "
            "verl's documentation says that vanilla replaces it"
        )


def _of_rows(loaded: LoadedConfig) -> Iterator[str]:
    """Yield notes of table rows on keys that differ between versions of verl, or between verl and rltrain."""
    written = {*loaded.explicit, *loaded.written.values()}
    for row in rows("differs"):
        value = get(loaded.config, row.key)
        conditions = row.to.split(" and ") if row.to else []
        held = all(
            text[1:] not in written if text[0] == "!" else is_met(loaded.config, "", text) for text in conditions
        )
        if row.key in loaded.explicit and row.condition.holds(value) and held:
            yield f"{row.key}={as_text(value)}: {row.note}"


def _conditions(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    for key in loaded.explicit:
        for scope, condition, why in all_keys()[free_form_parent(key) or key].only_with:
            if not is_met(loaded.config, scope, condition):
                yield key, why or unmet(loaded.config, scope, condition)
                break


def _not_read(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Yield keys that other estimators or losses read, but not the chosen one."""
    algorithm, actor = loaded.config.algorithm, loaded.config.actor_rollout_ref.actor
    estimator, loss = algorithm.adv_estimator, actor.policy_loss.loss_mode
    for section, table, chosen, name in (
        ("algorithm.", ESTIMATORS, estimator_traits(estimator), f"adv_estimator={estimator}"),
        (_A + "actor.", POLICY_LOSSES, loss_traits(loss), f"loss_mode={loss}"),
    ):
        # A user's function may read any key, so there is no note on it.
        every = {key for traits in table.values() for key in traits.reads or ()}
        for key in every - set(every if chosen.reads is None else chosen.reads):
            readers = " or ".join(reader for reader, traits in table.items() if key in (traits.reads or ()))
            yield f"{section}{key}", f"{name} does not read it, only {readers}"


def _unused_by_engine(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Yield keys that the chosen engine does not read, and arguments of other engines."""
    name, section = loaded.config.actor_rollout_ref.rollout.name, _A + "rollout."
    prefix = f"{section}engine_kwargs.{name}."
    for key in loaded.explicit:
        if (free_form_parent(key) or key).removeprefix(section) in ENGINES[name].unused_keys:
            yield key, f"the engine is rollout.name={name}"
        elif key.startswith(section + "engine_kwargs.") and not key.startswith(prefix):
            yield key, f"the engine is rollout.name={name}, whose arguments are {prefix.rstrip('.')}"
        elif key.startswith(prefix) and key.removeprefix(prefix).partition(".")[0] in ENGINES[name].outdated_arguments:
            yield key, f"{name} has no such argument any more"


def _decided_by_others(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Yield keys whose value another key, or rltrain itself, decides."""
    trainer, roles = loaded.config.trainer, loaded.config.actor_rollout_ref
    if roles.model.lora_adapter_path is not None:
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
            yield f"{_A}model.{name}", "lora_adapter_path determines rank, scale and layers"
    if roles.actor.fsdp_config.fsdp_size >= trainer.nnodes * trainer.n_gpus_per_node:
        yield f"{_A}actor.fsdp_config.fsdp_size", "all devices share one copy of the weights anyway"
    for model in (_A + "model", "critic.model"):
        if "attn_implementation" in get(loaded.config, model).override_config:
            key = f"{model}.override_config.attn_implementation"
            yield key, "attention always runs over packed sequences, in rltrain's code"
    if loaded.config.algorithm.rollout_correction.bypass_mode:
        yield f"{_A}actor.recompute_old_log_prob", "with bypass_mode there is no old_log_prob pass"
    elif keys := needs_all_old_log_probs(loaded.config):
        yield f"{_A}actor.recompute_old_log_prob", f"the old_log_prob pass covers all samples because of {keys[0]}"
    if left_out := sorted({"model", "optimizer", "extra"} - set(roles.actor.checkpoint.save_contents)):
        why = f"{', '.join(left_out)} omitted, but always saved, so that every checkpoint can be resumed"
        yield f"{_A}actor.checkpoint.save_contents", why
