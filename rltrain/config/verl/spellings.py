"""Settings that earlier versions of verl wrote with other values, or with other numbers of keys, in today's form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.config.schema.algorithm import bounds

_C = "algorithm.rollout_correction."
_TIS = "actor_rollout_ref.actor.tis_imp_ratio_cap"
_LOWER, _VETO = _C + "rollout_rs_threshold_lower", _C + "rollout_token_veto_threshold"
# Rejection before it was named after estimators of the KL.
_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}

# Key -> its values as they were once written (in small letters), with what they are called today and a word on it.
VALUES: dict[str, dict[str, tuple[str, str]]] = {
    _C + "loss_type": {"true": ("reinforce", ""), "false": ("ppo_clip", "")},
    # The default of verl 0.9.1: the rewards before the KL.
    "algorithm.filter_groups.metric": {"reward": ("seq_reward", "")},
    "reward_model.reward_manager": {
        "gdpo": ("naive", "the numbers of gdpo_reward_keys are taken from every scorer"),
        "prime": ("naive", "scoring always runs in its own processes"),
        "remote": ("naive", "scoring always runs in its own processes"),
    },
}
# Importance weights as verl 0.6 wrote them, beside `rollout_correction` and not in it.
_IS = "algorithm.rollout_is"
_OF_06 = ("", "_threshold", "_threshold_lower", "_level", "_mode", "_veto_threshold")
# Keys that `of_several` reads beside ours.
OLD_KEYS = (_TIS, _LOWER, _VETO, *(_IS + end for end in _OF_06))


def of_several(old: Mapping[str, Any], value: Callable[[str], Any]) -> Iterator[tuple[str, str, str]]:
    """(our key, its value, what to say) for what was once written with other keys.

    old: the values of `OLD_KEYS` that were written. value: that of a key of ours. Raises ConfigError.
    """
    if (cap := _number(old, _TIS, "such as 2.0")) > 0:
        yield _C + "rollout_is", "token", f"{_TIS}={cap} is {_C}rollout_is=token with rollout_is_threshold={cap} here"
        yield _C + "rollout_is_threshold", str(cap), ""
    yield from _of_06(old)
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
        # Once the bounds were on pi_trainer / pi_engine, today they are on its inverse.
        low, high = _both(source, limits, lower)
        rules, limits = [rule], f"{1 / high:.6g}_{1 / low:.6g}"
    else:
        rules = [written] if written else []
    if veto:
        # The k2 of a token at the veto.
        limit = f"{math.log(veto) ** 2 / 2:.6g}"
        rules, limits = [*rules, "seq_max_k2"], f"{limits},{limit}" if rules else limit
    yield (
        _C + "rollout_rs",
        ",".join(rules),
        f"{_C}rollout_rs={','.join(rules)} with rollout_rs_threshold={limits} is what rejects here"
        + (f"; an answer is also rejected for a token whose ratio is over {1 / veto:g}" if veto else ""),
    )
    yield _C + "rollout_rs_threshold", limits, ""


def _of_06(old: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """algorithm.rollout_is* of verl 0.6. Without a threshold nothing of it counts there."""
    high, level, mode = (_number(old, _IS + "_threshold", "such as 2.0", over=0), *_words(old))
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
        yield (
            _C + "rollout_rs",
            rule,
            f"{_IS}_mode=mask is {_C}rollout_rs={rule} with rollout_rs_threshold={limits} here",
        )
        yield _C + "rollout_rs_threshold", limits, ""


def _words(old: Mapping[str, Any]) -> Iterator[str]:
    for end, usual, among in (("_level", "token", tuple(_RULES)), ("_mode", "truncate", ("truncate", "mask"))):
        word = old.get(_IS + end) or usual
        if word not in among:
            raise ConfigError(f"{_IS}{end}={word}: use one of {', '.join(among)}.")
        yield word


def _number(old: Mapping[str, Any], key: str, such: str, over: float = -math.inf, under: float = math.inf) -> float:
    """The value of an earlier key, 0 where it is off."""
    if not (text := old.get(key)):
        return 0.0
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = math.nan
    if not over < number < under:
        wanted = f" over {over:g}" * (over >= 0) + f" and under {under:g}" * (under < math.inf)
        raise ConfigError(f"{key}={text}: it must be a number{wanted}, {such}.")
    return number


def _both(key: str, limits: str, lower: float) -> tuple[float, float]:
    try:
        low, high = bounds(limits)
    except ValueError as error:
        raise ConfigError(f"{key}={limits}: {error}.") from None
    low = lower or (1 / high if low is None else low)
    if not 0 < low < high:
        raise ConfigError(f"{key}={limits}: the bounds are {low:g} and {high:g}; give two such as 0.5_2.0.")
    return low, high
