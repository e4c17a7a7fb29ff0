"""How much one forward may hold, pass by pass: the only place that knows which keys say so.

A pass over samples is cut into micro-batches by tokens (``…use_dynamic_bsz=True``) or by a number of samples. Both are per device.
Totals over all ranks, which verl also has, are refused: the same command would mean something else on another number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rltrain.config.keys import get
from rltrain.config.schema import Config

_A = "actor_rollout_ref."


@dataclass(frozen=True)
class PassBudget:
    """What one forward on one data-parallel rank may hold: tokens, or samples."""

    max_tokens: int | None
    max_samples: int | None

    def __str__(self) -> str:
        return f"{self.max_tokens:,} tokens" if self.max_tokens else f"{self.max_samples} samples"


@dataclass(frozen=True)
class _Pass:
    """The keys of one pass. sharing: the key of the number of ranks that share a sequence. like: the pass whose size is the default."""

    section: str
    switch: str
    tokens: str
    samples: str
    sharing: str | None
    like: str | None = None

    def key(self, name: str) -> str:
        return f"{self.section}.{getattr(self, name)}"

    def value(self, config: Config, name: str) -> Any:
        return get(config, self.key(name))

    def ranks_per_sequence(self, config: Config) -> int:
        return get(config, f"{self.sharing}.ulysses_sequence_parallel_size") if self.sharing else 1


_UPDATE = ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
_FORWARD = ("use_dynamic_bsz", "forward_max_token_len_per_gpu", "forward_micro_batch_size_per_gpu")
_LOG_PROB = ("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu")
_PASSES = {
    "update": _Pass(_A + "actor", *_UPDATE, _A + "actor"),
    "log_prob": _Pass(_A + "rollout", *_LOG_PROB, _A + "actor", like="update"),
    "ref": _Pass(_A + "ref", *_LOG_PROB, _A + "ref", like="update"),
    "critic": _Pass("critic", *_UPDATE, "critic"),
    "values": _Pass("critic", *_FORWARD, "critic", like="critic"),
    "reward_model": _Pass("reward_model", *_FORWARD[:2], "micro_batch_size_per_gpu", None),
}


def budgets(config: Config) -> dict[str, PassBudget]:
    """The budget of each pass, by the pass's name."""
    return {
        name: PassBudget(one.value(config, "tokens") * one.ranks_per_sequence(config), None)
        if one.value(config, "switch")
        else PassBudget(None, _samples(config, one) or 1)
        for name, one in _PASSES.items()
    }


def budget_problems(config: Config) -> Iterator[str]:
    """Budgets that the longest sequence exceeds, and sizes that are missing."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    unused = set() if config.algorithm.needs_critic else {"critic", "values"}
    unused |= set() if config.reward_model.enable else {"reward_model"}
    for name, one in _PASSES.items():
        if name in unused:
            continue
        group, tokens = one.ranks_per_sequence(config), one.value(config, "tokens")
        if one.value(config, "switch"):
            # The reward model's own chat template makes sequences of other lengths.
            if group > 0 and tokens * group < longest and name != "reward_model":
                over = f" over {group} devices" if group > 1 else ""
                yield (
                    f"{one.key('tokens')}={tokens} cannot hold the longest sequence: data.max_prompt_length + "
                    f"data.max_response_length = {longest} tokens{over}. Set it to at least {-(-longest // group)}."
                )
        # Where the pass that gives the default is cut by samples too, its own missing size is the one error to mend.
        elif not _samples(config, one) and not (one.like and not _PASSES[one.like].value(config, "switch")):
            yield f"{one.key('switch')}=False needs {one.key('samples')} (samples per forward on one device). Try 4."


def total_problem(config: Config | None, key: str, total: Any) -> str:
    """What to type in place of ``key``, which counts samples over all ranks."""
    one = next((one for one in _PASSES.values() if one.key("samples") == f"{key}_per_gpu"), None)
    advice, here = "", ""
    if config and one and isinstance(total, int):
        devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
        number = max(1, devices // max(1, one.ranks_per_sequence(config)))
        advice, here = f"={max(1, total // number)}", f" ({number} here)"
    return f"{key}={total} counts samples over all data-parallel ranks{here}. Use {key}_per_gpu{advice}, which counts those of one."


def _samples(config: Config, one: _Pass) -> int | None:
    """The number of samples that is set for a pass, or for the pass that gives its default."""
    own = one.value(config, "samples")
    return _samples(config, _PASSES[one.like]) if own is None and one.like else own
