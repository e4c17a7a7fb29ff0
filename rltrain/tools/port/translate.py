"""Translation of verl's settings. Each decision leaves a comment or a line about the part that was not carried over.

`load_config` knows verl's names and meanings: every setting is tried alone, and its message becomes the comment. The
table here has only settings of other backends that `load_config` rejects but that have the same meaning under FSDP2.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rltrain.common.errors import ConfigError
from rltrain.config.budgets import share_of_rank
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.loaded import LoadedConfig
from rltrain.config.schema.declarations import LOSS_KEY, POLICY_LOSSES, TOKEN_MEAN, LossTraits
from rltrain.config.schema.keys import all_keys, followed, get, is_known
from rltrain.config.verl.keys import classes, places_of, rename, rows_of, verdict
from rltrain.config.verl.old_keys import is_old
from rltrain.run.checkpoints.foreign import has_verl_checkpoints
from rltrain.tools.port.rules import SPREAD, parsed_or_text, rule_of

_A = "actor_rollout_ref."
_R = _A + "rollout."
# Keys that `_defaults_of_verl` and `_min_lr` read. In a configuration that lists every key they are kept even if they
# have the default value.
ASKED = (
    *("trainer.n_gpus_per_node", "trainer.logger", _R + "name", _R + "tensor_model_parallel_size"),
    *(_A + "actor.clip_ratio_low", _A + "actor.clip_ratio_high", _A + "actor.optim.lr", "critic.optim.lr"),
)


# The keys that name verl's default run folder.
_NAMES = ("trainer.project_name", "trainer.experiment_name")


@dataclass
class Ported:
    """A launch with rltrain's settings."""

    settings: dict[str, str] = field(default_factory=dict)
    """rltrain's key -> the value as typed."""
    comments: dict[str, list[str]] = field(default_factory=dict)
    """rltrain's key -> reasons."""
    decisions: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    """Settings that were omitted because they have no effect."""
    lost: list[str] = field(default_factory=list)
    """Settings that could not be carried over, as key=value: reason."""
    to_do: list[str] = field(default_factory=list)
    """Problems of the result."""

    def put(self, key: str, text: str, why: str = "") -> None:
        """Set a key of rltrain; ``why`` becomes a comment above it."""
        self.settings[key] = text
        if why and why not in self.comments.setdefault(key, []):
            self.comments[key].append(why)


def translate(written: Sequence[tuple[str, str]], unknown: str = "__") -> Ported:
    """Translate verl's settings, in the order they were written.

    unknown: marker of a variable's placeholder in a value; such a value need not be a number yet.
    """
    ported = Ported()
    last = {key.lstrip("+"): text for key, text in written}
    _own_classes(ported, last)
    older = _older_spellings(ported, last)
    for key, text in last.items():
        if key not in older:
            _translate_key(ported, key, text, last)
    _replace_rings(ported)
    _min_lr(ported, last)
    _totals(ported, last)
    _not_read(ported)
    _defaults_of_verl(ported, last)
    _checkpoints(ported, last)
    _drop_our_defaults(ported)
    _check(ported, unknown)
    return ported


def _own_classes(ported: Ported, last: dict[str, str]) -> None:
    """Join path and name of a user's class to one setting, and keep the data keys that only the class reads."""
    chosen = False
    for pair, key in classes().items():
        path, name = (last.get(setting, "null") for setting in pair)
        if "null" not in (path, name):
            ported.put(key, f"{path}:{name}", f"was {' and '.join(pair)}")
            chosen = True
            del last[pair[0]], last[pair[1]]
    for key in [key for key in last if chosen and key.startswith("data.") and not is_known(rename(key))]:
        if not ((ruling := verdict(key, parsed_or_text(last[key]))) and ruling.refused):
            ported.put(key.replace("data.", "data.own_keys.", 1), last.pop(key), "only your own class reads it")


def _older_spellings(ported: Ported, written: Mapping[str, str]) -> set[str]:
    """Translate groups of keys that contain an old spelling of one setting; return them."""
    old = {key for key in written if is_old(key, written[key])}
    keys = old | {key for key in written if key.startswith("algorithm.rollout_correction.")}
    if not old:
        return set()
    # Placeholders for the required paths, so that loading does not fail on missing keys.
    required = [f"{_A}model.path=/model", "data.train_files=/data"]
    try:
        loaded = load_config([*required, *(f"{key}={written[key]}" for key in written if key in keys)])
    except ConfigError:
        return set()  # keys are reported one by one
    for key in loaded.explicit:
        if key.startswith("algorithm.rollout_correction."):
            ported.put(key, typed(get(loaded.config, key)), "was written in an older spelling")
    return keys


def _translate_key(ported: Ported, key: str, text: str, written: Mapping[str, str]) -> None:
    if _is_total(key) or key.endswith(".optim.min_lr"):
        return  # translated later, when all settings are known
    rule = rule_of(key)
    if rule is None or is_known(rename(key)):
        _try(ported, key, text, {}, _compared_with(key, written))
        return
    turned = rule.turn(text)
    if turned is None:
        ported.lost.append(f"{key}={text}: {rule.why or 'it has no counterpart here'}")
    elif rule.target and text not in ("null", "None"):
        names = places_of(key) | {"last": key.rpartition(".")[2]}
        _try(ported, rule.target.format(**names), turned, {"why": rule.why.format(**names)})
    elif rule.why and text not in ("null", "None", "False", "false", "1", "0"):
        ported.decisions.append(f"{key.rpartition('.')[2]}: {rule.why}" if rule.why != SPREAD else rule.why)


def _replace_rings(ported: Ported) -> None:
    """Replace ring attention by Ulysses if a model uses tensor parallelism, because the two cannot be combined."""
    if not any(key.endswith(".tensor_parallel_size") and text != "1" for key, text in ported.settings.items()):
        return
    for key in [key for key in ported.settings if key.endswith(".ring_attention_size")]:
        why = "was context_parallel_size; it cannot be combined with tensor_parallel_size"
        ported.put(key.replace("ring_attention_size", "ulysses_sequence_parallel_size"), ported.settings.pop(key), why)


def _compared_with(key: str, written: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with which the table's rows of ``key`` compare it."""
    others = {value[2:-1] for row in rows_of(key) for value in row.condition.values}
    return {other: text for other, text in written.items() if rename(other) in others}


def _try(
    ported: Ported, key: str, text: str, said: Mapping[str, str], others: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Try one setting with `load_config`. others: settings that are needed to check it."""
    own_key, why = rename(key), said.get("why", "")
    try:
        loaded = load_config([f"{key}={text}", *(f"{other}={value}" for other, value in others.items())])
    except ConfigError as error:
        if "__" in text and is_known(own_key):  # a variable of the user stands for a number
            ported.put(own_key, text, why)
        else:
            ported.lost.append(f"{key}={text}: {_reason(key, text, error)}")
        return
    if is_known(own_key):
        if own_key in loaded.explicit:
            ported.put(own_key, text, why or (f"was {key}" if own_key != key else ""))
        return
    # The key may be replaced by other keys, or by none.
    set_keys = [set_key for set_key in loaded.explicit if set_key not in map(rename, others)]
    for set_key in set_keys:
        ported.put(set_key, typed(get(loaded.config, set_key)), f"was {key}={text}")
    if not set_keys:
        ported.without_effect += loaded.warnings


def _reason(key: str, text: str, error: ConfigError) -> str:
    """Return the problems of the setting itself, without missing keys, which every trial reports."""
    problem = " ".join(line for line in str(error).splitlines() if line not in _problems_of_any_trial())
    for head in (f"{key}={parsed_or_text(text)}: ", f"{key}={text}: ", f"{key}: "):
        problem = problem.removeprefix(head)
    return problem


@functools.cache
def _problems_of_any_trial() -> tuple[str, ...]:
    try:
        load_config(["=", f"{_R}tensor_model_parallel_size=1"])
    except ConfigError as error:
        return tuple(str(error).splitlines())
    return ()


def typed(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if isinstance(value, dict | list):
        return json.dumps(value)
    return "null" if value is None else str(value)


def _is_total(key: str) -> bool:
    return not is_known(key) and is_known(f"{key}_per_gpu")


def _totals(ported: Ported, written: Mapping[str, str]) -> None:
    """Convert micro-batch sizes over all ranks, which verl divides by the number of ranks."""
    for key, text in written.items():
        size = parsed_or_text(text)
        if not _is_total(key) or size is None:
            continue
        if f"{key}_per_gpu" in ported.settings:
            ported.without_effect.append(f"{key}: {key}_per_gpu is set, too")
            continue
        try:
            share, ranks = share_of_rank(key, size, lambda count: _count(written, count))
        except TypeError:
            ported.lost.append(f"{key}={text}: set {key}_per_gpu to its share of one rank, which depends on variables")
            continue
        ported.put(f"{key}_per_gpu", str(share), f"was {key}={size} over {ranks} ranks")


def _count(written: Mapping[str, str], key: str) -> Any:
    """Return a number of devices as written, with verl's defaults; a text if variables decide it."""
    value = parsed_or_text(written.get(key, "null"))
    if value is not None:
        return value
    source = followed(key)
    return _count(written, source) if source else {"trainer.n_gpus_per_node": 8}.get(key, 1)


def _number(written: Mapping[str, str], key: str, default: int) -> int:
    value = parsed_or_text(written.get(key, "null"))
    return value if isinstance(value, int) and value > 0 else default


def _min_lr(ported: Ported, written: Mapping[str, str]) -> None:
    """Convert Megatron's lowest learning rate to a fraction of the rate."""
    for key, text in written.items():
        if key.endswith(".optim.min_lr"):
            low, lr = parsed_or_text(text), parsed_or_text(written.get(key.replace("min_lr", "lr"), "null"))
            if low and isinstance(low, int | float) and isinstance(lr, int | float):
                ported.put(key.replace("min_lr", "min_lr_ratio"), f"{low / lr:g}", f"was min_lr={text}")
            elif low:
                ported.lost.append(f"{key}={text}: set min_lr_ratio, its share of lr")


def _not_read(ported: Ported) -> None:
    """Remove settings that a policy loss ignores in verl but not here."""
    settings, mode = ported.settings, _A + "actor.loss_agg_mode"
    loss = settings.get(LOSS_KEY, "vanilla")
    usual = POLICY_LOSSES.get(loss, LossTraits()).aggregation
    if usual != TOKEN_MEAN and settings.get(mode, usual) != usual:
        later = " (verl 0.9 uses the key: set it again for its behaviour)" if loss == "gspo" else ""
        ported.decisions.append(
            f"loss_agg_mode={settings.pop(mode)}: verl's {loss} uses {usual}, whatever the key is{later}"
        )


def _defaults_of_verl(ported: Ported, written: Mapping[str, str]) -> None:
    """Add verl's defaults on which a script relies, if rltrain's default differs."""
    put = ported.put
    if "trainer.n_gpus_per_node" not in written:
        put("trainer.n_gpus_per_node", "8", "verl's default; ours is the devices that are here")
    if "trainer.logger" not in written:
        put("trainer.logger", '["console","wandb"]', "verl's default")
    if _R + "name" not in written:
        put(_R + "name", "vllm", "verl's default")
    several = written.get(_R + "name") != "hf" and not _number(written, "trainer.n_gpus_per_node", 8) % 2
    if several and _R + "tensor_model_parallel_size" not in written:
        why = "verl's default; where the model fits one device, 1 (the default here) is quicker"
        put(_R + "tensor_model_parallel_size", "2", why)
    clip, bounds = _A + "actor.clip_ratio", (_A + "actor.clip_ratio_low", _A + "actor.clip_ratio_high")
    # A custom loss may read the bounds.
    reads = POLICY_LOSSES.get(ported.settings.get(LOSS_KEY, "vanilla"), LossTraits()).reads
    bounded = reads is None or "clip_ratio_low" in reads
    if clip in ported.settings and parsed_or_text(ported.settings[clip]) != 0.2 and bounded:
        for bound in bounds:
            if bound not in written:
                put(bound, "0.2", "verl's default, which goes before clip_ratio; here clip_ratio alone would set both")


def _checkpoints(ported: Ported, written: Mapping[str, str]) -> None:
    path = written.get("trainer.resume_from_path", "null")
    if path not in ("null", "", "False"):
        ported.settings.pop("trainer.resume_from_path", None)
        ported.settings.pop("trainer.resume_mode", None)
        ported.lost.append(
            f"trainer.resume_from_path={path}: only the weights of a verl checkpoint can be read, not the optimizer: "
            f"python -m rltrain.checkpoint export {path}/actor FOLDER (Megatron's: python -m verl.model_merger), then "
            f"{_A}model.path=FOLDER (the KL is then to these weights, unless the reference has a separate model)"
        )
    key, usual = "trainer.default_local_dir", "/".join(("checkpoints", *(written.get(name, "null") for name in _NAMES)))
    folder = str(parsed_or_text(ported.settings.get(key, "null")) or usual)
    # the folder refers to other keys that are set, so it is the default
    named = key in ported.settings and "${" not in folder
    if named or has_verl_checkpoints(Path(usual)):
        folder = folder if named else usual
        why = f"was {folder}, where verl's checkpoints are: a run resumes only from its own checkpoints"
        ported.put(key, f"{folder.rstrip('/')}-rltrain", why)


def _drop_our_defaults(ported: Ported) -> None:
    """Remove settings that equal the default. A batch switch is kept, because its presence determines how sizes are
    read."""
    for key, text in list(ported.settings.items()):
        schema_key = all_keys().get(key)
        if (
            schema_key
            and not key.endswith(("use_dynamic_bsz", "loss_agg_mode"))
            and parsed_or_text(text) == schema_key.default
        ):
            del ported.settings[key]


def _check(ported: Ported, unknown: str) -> None:
    """Check all settings, except values that only the user's shell knows."""
    sure = [f"{key}={text}" for key, text in ported.settings.items() if unknown not in text or _is_text(key)]
    try:
        loaded: LoadedConfig = load_config(sure)
        check(loaded)
    except ConfigError as error:
        ported.to_do += str(error).splitlines()


def _is_text(key: str) -> bool:
    schema_key = all_keys().get(key)
    return schema_key is None or not schema_key.type_name.startswith(("int", "float", "bool"))
