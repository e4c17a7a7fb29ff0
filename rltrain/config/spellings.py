"""Settings that earlier versions of verl wrote with other values, or with other numbers of keys, in today's form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_C = "algorithm.rollout_correction."
_TIS = "actor_rollout_ref.actor.tis_imp_ratio_cap"
_LOWER, _VETO = _C + "rollout_rs_threshold_lower", _C + "rollout_token_veto_threshold"
# Rejection before it was named after estimators of the KL.
_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}

# Key -> its values as they were once written (in small letters), with what they are called today and a word on it.
VALUES: dict[str, dict[str, tuple[str, str]]] = {
    _C + "loss_type": {"true": ("reinforce", ""), "false": ("ppo_clip", "")},
    "reward_model.reward_manager": {
        "gdpo": ("naive", "the numbers of gdpo_reward_keys are taken from every scorer"),
        "prime": ("naive", "scoring always runs in its own processes"),
        "remote": ("naive", "scoring always runs in its own processes"),
    },
}
# Keys that `of_several` reads beside ours.
OLD_KEYS = (_TIS, _LOWER, _VETO)


def of_several(old: Mapping[str, Any], value: Callable[[str], Any]) -> Iterator[tuple[str, str, str]]:
    """(our key, its value, what to say) for what was once written with other keys.

    old: the values of `OLD_KEYS` that were written. value: that of a key of ours.
    """
    if (cap := old.get(_TIS)) and cap > 0:
        yield _C + "rollout_is", "token", f"{_TIS}={cap} is {_C}rollout_is=token with rollout_is_threshold={cap} here"
        yield _C + "rollout_is_threshold", str(cap), ""
    written, upper = value(_C + "rollout_rs"), value(_C + "rollout_rs_threshold")
    rule, lower, veto = _RULES.get(str(written)), old.get(_LOWER), old.get(_VETO)
    if not (rule or lower or veto):
        return
    limits = str(upper or value(_C + "rollout_is_threshold"))
    if rule:
        # Once the bounds were on pi_trainer / pi_engine, today they are on its inverse.
        low, high = float(lower or 1 / float(limits)), float(limits)
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
