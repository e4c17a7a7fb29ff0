"""Keys that do here what they say, where verl does something else: told wherever they are set so that it matters.

All such differences stand in docs/from-verl.md; here are those that a command shows.
"""

from __future__ import annotations

from collections.abc import Iterator

from rltrain.config.loaded import LoadedConfig
from rltrain.config.schema import Config
from rltrain.config.schema.declarations import LOSS_KEY, TOKEN_MEAN, loss_traits

_A = "actor_rollout_ref.actor."
# What clip_ratio_low and clip_ratio_high are in verl's own files, where they are set and so win over clip_ratio.
_VERL_CLIP = 0.2


def compares_nothing(config: Config) -> bool:
    """Whether the advantage is the score itself, because a prompt has one answer where answers are compared."""
    return config.algorithm.estimator.takes_one and config.actor_rollout_ref.rollout.n < 2


def other_meanings(loaded: LoadedConfig) -> Iterator[str]:
    """One line for each key the user set by which a run learns otherwise than verl's would."""
    actor, correction = loaded.config.actor_rollout_ref.actor, loaded.config.algorithm.rollout_correction
    if compares_nothing(loaded.config):
        estimator = f"algorithm.adv_estimator={loaded.config.algorithm.adv_estimator}"
        yield (
            f"actor_rollout_ref.rollout.n=1: ONE ANSWER TO A PROMPT, SO {estimator} COMPARES NOTHING: the advantage is "
            "the score itself, as in verl. Set actor_rollout_ref.rollout.n=8 to compare answers"
        )
    loss, mode = actor.policy_loss.loss_mode, actor.loss_agg_mode
    own = loss_traits(loss).aggregation
    if mode and own not in (mode, TOKEN_MEAN):
        yield (
            f"{_A}loss_agg_mode={mode}: followed as it is set, although loss_mode={loss} is defined with {own}, which "
            "verl takes whatever this key says. Leave it out for that."
        )
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and loss != "vanilla":
        yield f"{LOSS_KEY}={loss}: its ratio is taken against the engine; with bypass_mode verl replaces it by vanilla"
    written = {name for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high") if _A + name in loaded.explicit}
    if written == {"clip_ratio"} and actor.clip_ratio != _VERL_CLIP:
        yield (
            f"{_A}clip_ratio={actor.clip_ratio}: it is both bounds of the clip; verl keeps them at {_VERL_CLIP} unless "
            "clip_ratio_low and clip_ratio_high are set"
        )
