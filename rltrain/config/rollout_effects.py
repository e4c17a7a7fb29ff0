"""Keys under actor_rollout_ref.rollout that change nothing in some modes (see `effects`)."""

from __future__ import annotations

from collections.abc import Callable

from rltrain.config.schema import Config

_R = "actor_rollout_ref.rollout."

ROLLOUT_MODES: tuple[tuple[tuple[str, ...], Callable[[Config], bool], str], ...] = (
    (
        (_R + "oversample_ratio", _R + "tail_max_age"),
        lambda cfg: not cfg.actor_rollout_ref.rollout.stops_early,
        "only tail=oversample and tail=carry_over stop early",
    ),
    (
        (_R + "tail_max_age",),
        lambda cfg: cfg.actor_rollout_ref.rollout.oversample_ratio == 1,
        "with oversample_ratio=1 no prompt is left over",
    ),
    (
        (_R + "tail_draft_tokens",),
        lambda cfg: cfg.actor_rollout_ref.rollout.tail != "exact",
        "only tail=exact decodes speculatively",
    ),
)
