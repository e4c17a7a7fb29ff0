"""Sizes that were not written, where verl runs the command and our default would not: taken from the other keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from rltrain.config.schema.engines import ENGINES

_R = "actor_rollout_ref.rollout."
_BATCH, _MINI = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
_BUDGET = _R + "max_num_batched_tokens"


def unwritten(explicit: Collection[str], value: Callable[[str], Any]) -> Iterator[tuple[str, int, str]]:
    """(key, its value, what to say). explicit: the keys that were written. value: that of a key."""
    batch, mini = value(_BATCH), value(_MINI)
    if _MINI not in explicit and _whole(batch, mini) and 0 < batch < mini:
        # As older versions of verl do, which cut a batch into pieces of at most so many; today's asserts.
        yield (
            _MINI,
            batch,
            f"{_MINI} is not set and {_BATCH}={batch} is below its default, {mini}: one mini-batch a step",
        )
    engine, budget = ENGINES.get(str(value(_R + "name"))), value(_BUDGET)
    if (
        _BUDGET in explicit
        or not (engine and engine.strict_prefill)
        or value(_R + "enable_chunked_prefill") is not False
    ):
        return
    lengths = value("data.max_prompt_length"), value("data.max_response_length")
    longest = value(_R + "max_model_len") or (sum(lengths) if _whole(*lengths) else 0)
    if _whole(longest, budget) and longest > budget:
        yield (
            _BUDGET,
            longest,
            f"{_BUDGET} is not set: {longest}, the longest sequence, as enable_chunked_prefill=False",
        )


def _whole(*values: Any) -> bool:
    return all(isinstance(each, int) for each in values)
