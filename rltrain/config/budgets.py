"""How much one forward may hold, pass by pass: the only place that knows which keys say so.

A pass over samples is cut into micro-batches by tokens (``…use_dynamic_bsz=True``) or by a number of samples. Both are
per device. Totals over all ranks, which verl also has, are refused: the same command would mean something else on
another number of devices.
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
    """The keys of one pass.

    sharing: the section that says how many ranks share a sequence. like: the pass whose number of samples is the
    default.
    """

    switch: str
    tokens: str
    samples: str
    sharing: str | None
    like: str | None = None

    def ranks_per_sequence(self, config: Config) -> int:
        return get(config, f"{self.sharing}.ulysses_sequence_parallel_size") if self.sharing else 1

    def num_samples(self, config: Config) -> int | None:
        own = get(config, self.samples)
        return _PASSES[self.like].num_samples(config) if own is None and self.like else own


def _pass(section: str, forward: str, sharing: str | None, like: str | None = None) -> _Pass:
    """forward: what the keys of the budget begin with; those of log-prob passes have it in the switch too."""
    switch = "log_prob_use_dynamic_bsz" if forward == "log_prob_" else "use_dynamic_bsz"
    tokens = f"{forward or 'forward_'}max_token_len_per_gpu"
    return _Pass(
        f"{section}.{switch}", f"{section}.{tokens}", f"{section}.{forward}micro_batch_size_per_gpu", sharing, like
    )


_PASSES = {
    "update": _pass(_A + "actor", "ppo_", _A + "actor"),
    "log_prob": _pass(_A + "rollout", "log_prob_", _A + "actor", like="update"),
    "ref": _pass(_A + "ref", "log_prob_", _A + "ref", like="update"),
    "critic": _pass("critic", "ppo_", "critic"),
    "values": _pass("critic", "forward_", "critic", like="critic"),
    "reward_model": _pass("reward_model", "", None),
}


def budgets(config: Config) -> dict[str, PassBudget]:
    """The budget of each pass, by the pass's name."""
    return {
        # A group that shares sequences has the room of all its devices. A size that is missing here is that of a pass
        # the run does not make; for the others `budget_problems` refuses it.
        name: PassBudget(get(config, one.tokens) * one.ranks_per_sequence(config), None)
        if get(config, one.switch)
        else PassBudget(None, one.num_samples(config) or 1)
        for name, one in _PASSES.items()
    }


def budget_problems(config: Config) -> Iterator[str]:
    """Budgets that the longest sequence exceeds, and sizes that are missing."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    critic, reward_model = config.algorithm.needs_critic, config.reward_model.enable
    used = {"critic": critic, "values": critic, "reward_model": reward_model}
    for name, one in _PASSES.items():
        if not used.get(name, True):
            continue
        group, tokens = one.ranks_per_sequence(config), get(config, one.tokens)
        if get(config, one.switch):
            # The reward model's own chat template makes sequences of other lengths.
            # A group of 0 is refused elsewhere; here it would only end the list of problems in a division by 0.
            if group > 0 and tokens * group < longest and name != "reward_model":
                over = f" over {group} devices" if group > 1 else ""
                yield (
                    f"{one.tokens}={tokens} cannot hold the longest sequence: data.max_prompt_length + "
                    f"data.max_response_length = {longest} tokens{over}. Set it to at least {-(-longest // group)}."
                )
        # Where the pass that gives the default is cut by samples too, its own missing size is the one error to mend.
        elif not one.num_samples(config) and not (one.like and not get(config, _PASSES[one.like].switch)):
            yield f"{one.switch}=False needs {one.samples} (samples per forward on one device). Try 4."


def total_problem(config: Config | None, key: str, total: Any) -> str:
    """What to type in place of ``key``, which counts samples over all ranks."""
    one = next((one for one in _PASSES.values() if one.samples == f"{key}_per_gpu"), None)
    advice, here = "", ""
    if config and one and isinstance(total, int):
        devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
        number = max(1, devices // max(1, one.ranks_per_sequence(config)))
        advice, here = f"={max(1, total // number)}", f" ({number} here)"
    return (
        f"{key}={total} counts samples over all data-parallel ranks{here}. "
        f"Use {key}_per_gpu{advice}, which counts those of one."
    )
