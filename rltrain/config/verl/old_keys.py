"""Translation of settings that versions of verl write with several keys, or omit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from rltrain.common.errors import ConfigError
from rltrain.config.schema.algorithm import bounds
from rltrain.config.schema.engines import ENGINES
from rltrain.config.verl.table import rows

_A = "actor_rollout_ref."
_R = _A + "rollout."
# In verl this section overrides optim.*.
OVERRIDES = ".override_optimizer_config."

_C = "algorithm.rollout_correction."
_TIS = _A + "actor.tis_imp_ratio_cap"
_LOWER, _VETO = _C + "rollout_rs_threshold_lower", _C + "rollout_token_veto_threshold"
# Earlier names of rejection rules -> names by KL estimator.
_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}

# Keys of importance weights in verl 0.6, outside of `rollout_correction`.
_IS = "algorithm.rollout_is"
_MODE = ("trainer.v1.trainer_mode", "colocate_async")
_TAIL = _R + "tail"
_FILTER, _DRAWN = "algorithm.filter_groups.", "data.gen_batch_size"
_BATCH, _MINI = "data.train_batch_size", _A + "actor.ppo_mini_batch_size"
_BUDGET = _R + "max_num_batched_tokens"


def is_old(key: str, value: Any) -> bool:
    """Return whether `translate_old_keys` reads this key with this value."""
    return any(row.key == key and row.when in ("", f"={value}") for row in rows("translated"))


def translate_old_keys(old: Mapping[str, Any], value: Callable[[str], Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (key of the schema, value, note) for settings written with earlier keys.

    old: settings that fulfil `is_old`. value: returns the value of a key of the schema. Raises ConfigError.
    """
    if (cap := _number(old, _TIS, "such as 2.0")) > 0:
        yield _C + "rollout_is", "token", f"{_TIS}={cap} is {_C}rollout_is=token with rollout_is_threshold={cap} here"
        yield _C + "rollout_is_threshold", str(cap), ""
    yield from _importance_of_06(old)
    if _MODE[0] in old:
        if value(_TAIL) == "off":
            note = f"{'='.join(_MODE)} is {_TAIL}=carry_over here: unfinished responses are continued in the next step"
            yield _TAIL, "carry_over", note
        if not value(_C + "bypass_mode") and not value(_C + "rollout_is"):
            note = f"{_C}rollout_is=token: tokens are weighted against the policy that sampled them, maybe an older one"
            yield _C + "rollout_is", "token", note
    written, upper = value(_C + "rollout_rs"), value(_C + "rollout_rs_threshold")
    rule = _RULES.get(str(written))
    lower = _number(old, _LOWER, "such as 0.5", over=0)
    vetos = [_number(old, key, "such as 1e-4", over=0, under=1) for key in (_VETO, _IS + "_veto_threshold")]
    veto = max(vetos) if old.get(_IS + "_threshold") else vetos[0]
    if not (rule or lower or veto):
        return
    source = _C + ("rollout_rs_threshold" if upper else "rollout_is_threshold")
    limits = str(value(source))
    if rule:
        # Earlier the bounds were on pi_trainer / pi_engine, now they are on the inverse.
        low, high = _two_bounds(source, limits, lower)
        rules, limits = [rule], f"{1 / high:.6g}_{1 / low:.6g}"
    else:
        rules = [written] if written else []
    if veto:
        # The k2 of a token at the veto threshold.
        limit = f"{math.log(veto) ** 2 / 2:.6g}"
        rules, limits = [*rules, "seq_max_k2"], f"{limits},{limit}" if rules else limit
    note = f"{_C}rollout_rs={','.join(rules)} with rollout_rs_threshold={limits} defines the rejection here"
    note += f"; a response is also rejected for a token whose ratio is over {1 / veto:g}" if veto else ""
    yield _C + "rollout_rs", ",".join(rules), note
    yield _C + "rollout_rs_threshold", limits, ""


def _importance_of_06(old: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield translations of verl 0.6's algorithm.rollout_is*, which have no effect without a threshold."""
    high, level, mode = (_number(old, _IS + "_threshold", "such as 2.0", over=0), *_level_and_mode(old))
    low = _number(old, _IS + "_threshold_lower", "such as 0.5", over=0, under=high) if high else 0.0
    weighs = high > 0 and old.get(_IS) in (True, 1)
    if weighs and level == "geometric":
        raise ConfigError(f"{_IS}_level=geometric: {_C}rollout_is has weights per token or sequence. Use one of these.")
    if weighs:
        note = f"{_IS}=True with {_IS}_level={level} is {_C}rollout_is={level} with rollout_is_threshold={high:g} here"
        yield _C + "rollout_is", level, note
        yield _C + "rollout_is_threshold", f"{high:g}", ""
    elif old.get(_IS):
        yield _C + "rollout_is", "", f"{_IS}: no effect: {_IS}_threshold is null, as in verl"
    if high and mode == "mask":
        rule, limits = _RULES[level], f"{1 / high:.6g}_{(low and 1 / low) or high:.6g}"
        note = f"{_IS}_mode=mask is {_C}rollout_rs={rule} with rollout_rs_threshold={limits} here"
        yield _C + "rollout_rs", rule, note
        yield _C + "rollout_rs_threshold", limits, ""


def _level_and_mode(old: Mapping[str, Any]) -> Iterator[str]:
    for end, usual, among in (("_level", "token", tuple(_RULES)), ("_mode", "truncate", ("truncate", "mask"))):
        word = old.get(_IS + end) or usual
        if word not in among:
            raise ConfigError(f"{_IS}{end}={word}: use one of {', '.join(among)}.")
        yield word


def _number(old: Mapping[str, Any], key: str, such: str, over: float = -math.inf, under: float = math.inf) -> float:
    """Return the value of an earlier key, 0 if it is off."""
    if not (text := old.get(key)):
        return 0.0
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = math.nan
    if not over < number < under:
        limits = f" over {over:g}" * (over >= 0) + f" and under {under:g}" * (under < math.inf)
        raise ConfigError(f"{key}={text}: it must be a number{limits}, {such}.")
    return number


def _two_bounds(key: str, limits: str, lower: float) -> tuple[float, float]:
    try:
        low, high = bounds(limits)
    except ValueError as error:
        raise ConfigError(f"{key}={limits}: {error}.") from None
    low = lower or (1 / high if low is None else low)
    if not 0 < low < high:
        raise ConfigError(f"{key}={limits}: the bounds {low:g} and {high:g} must be positive and in order (0.5_2.0).")
    return low, high


def read_by_version(
    explicit: Collection[str], foreign: Mapping[str, tuple[str, Any]], value: Callable[[str], Any]
) -> Iterator[tuple[str, str, Any, str]]:
    """Yield settings that versions of verl read differently: (key, as written, value, note).

    explicit: keys that were written. foreign: key -> (as written, value) of keys that the schema lacks. value: returns
    the value of a key.
    """
    version, filters, batch, drawn = map(value, ("trainer.verl_version", _FILTER + "enable", _BATCH, _DRAWN))
    if not filters and version != "0.9" and _are_integers(batch, drawn) and drawn not in (0, batch):
        note = f"{_DRAWN}={drawn} is the number of prompts in a step, as in verl 0.5 to 0.8 without {_FILTER}enable"
        yield _BATCH, _DRAWN, drawn, f"{note}; verl 0.9 trains on {_BATCH}={batch} (trainer.verl_version=0.9)"
    if filters and version == "0.9" and _FILTER + "metric" not in explicit:
        note = f"{_FILTER}metric is not set: seq_reward, as in verl 0.9"
        yield _FILTER + "metric", _FILTER + "metric", "seq_reward", note
    asked = next((name for name in ("rollout_is", "rollout_rs") if _C + name in explicit and value(_C + name)), "")
    returns = foreign.get(_R + "calculate_log_probs", ("", False))[1] in (True, 1)
    if asked and version != "0.9" and not (returns or value(_C + "bypass_mode") or value(_TAIL) != "off"):
        note = f"{_C}{asked} has an effect, as in verl 0.9; before, it has none unless {_R}calculate_log_probs=True"
        yield _C + asked, _C + asked, value(_C + asked), note


def sizes_not_written(explicit: Collection[str], value: Callable[[str], Any]) -> Iterator[tuple[str, int, str]]:
    """Yield (key, value, note) for omitted sizes whose default would be refused, because verl runs these commands.
    explicit: keys that were written. value: returns the value of a key.
    """
    batch, mini = value(_BATCH), value(_MINI)
    if _MINI not in explicit and _are_integers(batch, mini) and 0 < batch < mini:
        # As in older versions of verl, which split a batch into parts of at most this size; newer versions assert.
        note = f"{_MINI} is not set and {_BATCH}={batch} is below its default, {mini}: one mini-batch a step"
        yield _MINI, batch, note
    engine, budget = ENGINES.get(str(value(_R + "name"))), value(_BUDGET)
    unchunked = engine and engine.strict_prefill and value(_R + "enable_chunked_prefill") is False
    if _BUDGET in explicit or not unchunked:
        return
    lengths = value("data.max_prompt_length"), value("data.max_response_length")
    longest = value(_R + "max_model_len") or (sum(lengths) if _are_integers(*lengths) else 0)
    if _are_integers(longest, budget) and longest > budget:
        note = f"{_BUDGET} is not set: {longest}, the longest sequence, as enable_chunked_prefill=False"
        yield _BUDGET, longest, note


def _are_integers(*values: Any) -> bool:
    return all(isinstance(value, int) for value in values)
