"""The passes over samples that are cut into micro-batches, and the keys that say how: the one place that knows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rltrain.config.keys import get
from rltrain.config.schema import Config

_A = "actor_rollout_ref."


@dataclass(frozen=True)
class Pass:
    """What is set for one pass. It is cut by tokens (``dynamic``) or by samples; ``total`` counts samples over all ranks, ``size`` those
    of one. ``ranks_per_sequence`` hold each sequence together. A pass without a size of its own has that of ``like``."""

    used: bool
    switch: str
    dynamic: bool
    tokens_key: str
    tokens: int
    size_key: str
    size: int | None
    total_key: str
    total: int | None
    ranks_per_sequence: int
    like: str | None

    @property
    def has_size(self) -> bool:
        """Whether a number of samples is set."""
        return (self.size, self.total) != (None, None)


def passes(config: Config) -> dict[str, Pass]:
    """Those of actor, reference, critic and reward model, by name."""
    actor, ref = (getattr(config.actor_rollout_ref, role).ulysses_sequence_parallel_size for role in ("actor", "ref"))
    critic = config.critic.ulysses_sequence_parallel_size

    def make(
        section: str, switch: str, tokens: str, size: str, group: int, like: str | None, used: bool = True
    ) -> Pass:
        keys = [section + name for name in (switch, tokens, size + "_per_gpu")]
        switch_key, tokens_key, size_key = keys
        values = [get(config, key) for key in keys]
        total_key = section + size
        total = get(config, total_key) if section.startswith(_A) else None
        return Pass(
            used, switch_key, values[0], tokens_key, values[1], size_key, values[2], total_key, total, group, like
        )

    log_prob = ("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size")
    update = ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size")
    forward = ("use_dynamic_bsz", "forward_max_token_len_per_gpu", "forward_micro_batch_size")
    scoring = ("use_dynamic_bsz", "forward_max_token_len_per_gpu", "micro_batch_size")
    return {
        "update": make(f"{_A}actor.", *update, actor, None),
        "log_prob": make(f"{_A}rollout.", *log_prob, actor, "update"),
        "ref": make(f"{_A}ref.", *log_prob, ref, "update"),
        "critic": make("critic.", *update, critic, None, config.algorithm.needs_critic),
        "values": make("critic.", *forward, critic, "critic", config.algorithm.needs_critic),
        "reward_model": make("reward_model.", *scoring, 1, None, config.reward_model.enable),
    }


def sized(every: dict[str, Pass], one: Pass) -> Pass:
    """The pass whose number of samples counts for ``one``."""
    return every[one.like] if one.like and not one.has_size else one


def pass_problems(config: Config) -> Iterator[str]:
    """Budgets that the longest sequence is over, sizes that are missing or set twice."""
    every = passes(config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    for each in every.values():
        group = each.ranks_per_sequence
        if None not in (each.size, each.total):
            yield f"{each.total_key} and …_per_gpu are both set. Keep {each.size_key}."
        if not each.used:
            continue
        # The reward model's own template makes other lengths.
        if each.dynamic and group > 0 and each.tokens * group < longest and each is not every["reward_model"]:
            yield (
                f"{each.tokens_key}={each.tokens} cannot hold the longest sequence: data.max_prompt_length + "
                f"data.max_response_length = {longest} tokens"
                + (f" over {group} devices" if group > 1 else "")
                + f". Set it to at least {-(-longest // group)}."
            )
        # Where the other pass is cut by samples too, its own missing size is the one error to mend.
        like = every[each.like] if each.like else None
        if not each.dynamic and not each.has_size and (like is None or (like.dynamic and not like.has_size)):
            yield f"{each.switch}=False needs {each.size_key} (samples per forward on one device). Try 4."


def uneven_passes(config: Config, devices: int) -> Iterator[str]:
    """Totals that the data-parallel ranks do not divide."""
    every, told = passes(config), set()
    for each in every.values():
        ranks, size = max(1, devices // max(1, each.ranks_per_sequence)), sized(every, each)
        if not each.dynamic and size.total is not None and size.total % ranks and (size.total_key, ranks) not in told:
            told.add((size.total_key, ranks))
            yield f"{size.total_key}={size.total} is for all {ranks} data-parallel ranks and does not divide. Use {size.size_key}."
