"""Budgets of one forward per pass, and the keys that set them.

A pass over samples is cut into micro-batches by tokens or by a number of samples, per device. Padded micro-batches of
``…micro_batch_size_per_gpu`` samples hold as many tokens as that many longest sequences. If ``…use_dynamic_bsz`` is not
set, such a size is read as this many tokens. Packed micro-batches then hold more samples, but need no more memory than
the size was tuned for. Totals over all ranks, which verl also has, are refused, because their meaning would change with
the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rltrain.config.passes import PASSES, ROLES, BudgetKeys, Role
from rltrain.config.schema import Config
from rltrain.config.schema.keys import get
from rltrain.config.step_passes import roles_of

# Tokens of a message to a judge in addition to question and response: template and ground truth.
_JUDGE_WORDS = 1024


@dataclass(frozen=True)
class PassBudget:
    """Budget of one forward on one data-parallel rank: tokens, or samples."""

    max_tokens: int | None
    max_samples: int | None
    num_longest: int | None = None
    """Number of samples from which the tokens were computed, at the length of the longest sequence; None if the tokens
    were given."""
    max_rows: int | None = None
    """Patches (or tiles) of images, if prompts have some."""

    def __str__(self) -> str:
        if not self.max_tokens:
            return f"{self.max_samples} samples"
        images = f" and {self.max_rows:,} patches or tiles" if self.max_rows else ""
        size = f" ({self.num_longest} x the longest)" if self.num_longest else ""
        return f"{self.max_tokens:,} tokens{images}{size}"

    def with_images(self, most_rows: int) -> PassBudget:
        """Return this budget with a bound on the patches (or tiles) of images, if a prompt has up to ``most_rows`` of
        them.

        If the tokens come from a number of longest sequences, that size was tuned for as many prompts with their
        images, so their patches are the bound. A number of tokens needs no separate bound, because no micro-batch has
        more images than if every response encoded its own.
        """
        return replace(self, max_rows=self.num_longest * most_rows) if self.num_longest and most_rows else self


def decide(config: Config, keys: BudgetKeys) -> tuple[PassBudget, str]:
    """Return the budget that ``keys`` set, and the key that sets it ("" if none does)."""
    by_tokens, size_keys = get(config, keys.switch), keys
    while True:
        samples, tokens = get(config, size_keys.samples), get(config, size_keys.tokens)
        if samples is not None and by_tokens is not True:
            by_samples = PassBudget(None, samples)
            # Samples are counted per group of ranks that share a sequence, as in verl.
            packed = PassBudget(samples * longest_sequence(config), None, samples)
            return packed if by_tokens is None else by_samples, size_keys.samples
        if tokens is not None and by_tokens is not False:
            # A group that shares sequences has the memory of all its devices.
            return PassBudget(tokens * ranks_per_sequence(config, keys), None), size_keys.tokens
        if size_keys.like is None:
            return PassBudget(None, 1), ""
        size_keys = PASSES[size_keys.like].keys


def ranks_per_sequence(config: Config, keys: BudgetKeys) -> int:
    """Return the number of ranks that share a sequence in the pass of ``keys``."""
    return get(config, f"{keys.sharing}.ranks_per_sequence") if keys.sharing else 1


def budgets(config: Config) -> dict[str, PassBudget]:
    """Return the budget of each pass, by name. `budget_problems` refuses a missing one."""
    return {name: decide(config, step_pass.keys)[0] for name, step_pass in PASSES.items()}


def longest_sequence(config: Config) -> int:
    """Return the tokens of the longest prompt with the longest response."""
    return config.data.max_prompt_length + config.data.max_response_length


def longest_text(config: Config) -> int:
    """Return the tokens of the longest prompt with the longest generated response, including validation."""
    most = config.actor_rollout_ref.rollout.val_kwargs.max_tokens or 0
    return config.data.max_prompt_length + max(config.data.max_response_length, most)


def budget_problems(config: Config) -> Iterator[str]:
    """Yield errors for budgets below the longest sequence, and for missing sizes."""
    longest, reported_keys = longest_sequence(config), set()
    for name, keys in _used(config).items():
        (budget, key), group = decide(config, keys), ranks_per_sequence(config, keys)
        if not key:
            # If the pass with the default sizes is cut by samples too, report only its missing size.
            if not keys.like or get(config, PASSES[keys.like].keys.switch) is not False:
                yield f"{keys.switch}=False needs {keys.samples} (samples per forward on one device). Try 4."
        # The reward model's chat template changes the lengths. A group of 0 is refused elsewhere; here it would only
        # cause a division by 0.
        elif budget.max_tokens is not None and 0 < budget.max_tokens < longest and group > 0 and name != "reward":
            over = f" over {group} devices" if group > 1 else ""
            if key not in reported_keys:
                yield (
                    f"{key}={get(config, key)} is less than the longest sequence: data.max_prompt_length + "
                    f"data.max_response_length = {longest} tokens{over}. Set it to at least {-(-longest // group)}."
                )
            reported_keys.add(key)


def judge_lengths(config: Config) -> tuple[int, int]:
    """Return the maximum tokens of a message to a judge on the run's devices, and of its reply."""
    rollout = config.reward_model.rollout
    return rollout.prompt_length or longest_sequence(config) + _JUDGE_WORDS, rollout.response_length


def unused_sizes(config: Config) -> Iterator[tuple[str, str]]:
    """Yield keys of sizes that no pass of the run uses, with the setting that is used instead."""
    used = _used(config)
    deciding = {decide(config, keys)[1] for keys in used.values()}
    # The update always runs, and keys of a pass that does not run have a separate note.
    for keys in used.values():
        switch, (_, key) = get(config, keys.switch), decide(config, keys)
        setting = f"{keys.switch} is not set" if switch is None else f"{keys.switch}={switch}"
        for size in {keys.samples, keys.tokens} - deciding:
            yield size, f"{setting}, so {key}={get(config, key)} decides" if key else setting


def _used(config: Config) -> dict[str, BudgetKeys]:
    """Return the keys of the passes whose roles the run has.

    In training the reference may be the actor without its adapters.
    """
    roles = roles_of(config)
    roles |= {"ref"} if "actor" in roles else set()
    return {name: step_pass.keys for name, step_pass in PASSES.items() if step_pass.role in roles}


def share_of_rank(key: str, total: int, value: Callable[[str], Any]) -> tuple[int, int]:
    """Return (size per rank, ranks) of ``key``, whose ``total`` counts samples over all ranks as in older verl.

    value: returns the value of a key. The size is rounded down and at least 1, as in verl. Rounding is safe, because
    the number of samples per forward does not change the result.
    """
    keys = next((step_pass.keys for step_pass in PASSES.values() if step_pass.keys.samples == f"{key}_per_gpu"), None)
    names = ("ulysses_sequence_parallel_size", "ring_attention_size")
    sharing = math.prod(value(f"{keys.sharing}.{name}") for name in names) if keys and keys.sharing else 1
    sharing *= value(f"{ROLES['actor'].fsdp}.tensor_parallel_size") or 1
    ranks = max(1, value("trainer.nnodes") * value("trainer.n_gpus_per_node") // max(1, sharing))
    return max(1, total // ranks), ranks


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def tensor_size(config: Config, role: Role) -> int:
    """Return the number of ranks that share each matrix of the model of ``role``."""
    # A judge is an engine on one device. An evaluation has no actor, but its policy is the actor's model.
    if role == "judge":
        return 1
    own, actor = (get(config, f"{section}.tensor_parallel_size") for section in (ROLES[role].fsdp, ROLES["actor"].fsdp))
    return own or actor or 1


def ranks_per_sample(config: Config, role: Role, keys: BudgetKeys) -> int:
    """Return the number of ranks that get the same samples in a pass of ``role`` with ``keys``."""
    return ranks_per_sequence(config, keys) * tensor_size(config, role)


def tensor_problems(config: Config) -> Iterator[str]:
    """Yield errors for tensor parallelism that does not fit other keys, or the model that a role computes with."""
    roles, devices = config.actor_rollout_ref, config.trainer.nnodes * config.trainer.n_gpus_per_node
    actor = tensor_size(config, "actor")
    for role in roles_of(config):
        row, size = ROLES[role], tensor_size(config, role)
        if size == 1:
            continue
        own = get(config, f"{row.fsdp}.tensor_parallel_size") is not None
        key = f"{row.fsdp if own else ROLES['actor'].fsdp}.tensor_parallel_size"
        sharing = next((step.keys.sharing for step in PASSES.values() if step.role == role and step.keys.sharing), None)
        sequences = get(config, f"{sharing}.ulysses_sequence_parallel_size") if sharing else 1
        if sharing and (ring := get(config, f"{sharing}.ring_attention_size")) > 1:
            yield f"{key}={size}: it does not work together with {sharing}.ring_attention_size={ring}. Leave one out."
        if sequences > 0 and devices % (size * sequences) and not devices % size:
            yield (
                f"{key}={size} x {sharing}.ulysses_sequence_parallel_size={sequences} does not divide the {devices} "
                "devices. Lower one of them."
            )
        fsdp = get(config, row.fsdp if hasattr(get(config, row.fsdp), "fsdp_size") else ROLES["actor"].fsdp)
        if 0 < fsdp.fsdp_size < devices and fsdp.fsdp_size % size:
            yield f"{key}={size} does not divide fsdp_size={fsdp.fsdp_size}, the ranks of a copy. Use a divisor."
        if getattr(fsdp, "use_torch_compile", False):
            yield f"{key}={size}: layers that share matrices are not compiled. Leave {row.fsdp}.use_torch_compile out."
    reasons = reasons_to_match_actor(config)
    reasons["ref"] += ["actor_rollout_ref.ref.update_every_steps"] if roles.ref.update_every_steps else []
    for name in reasons:
        key = f"{ROLES[name].fsdp}.tensor_parallel_size"
        for why in reasons[name] if tensor_size(config, name) != actor else []:
            yield f"{key}={get(config, key)}: with {why} it must divide weights like the actor. Use {key}={actor}."


def sequence_problems(config: Config) -> Iterator[str]:
    """Yield errors for models that compute together with the actor but split sequences differently."""
    for role, reasons in reasons_to_match_actor(config).items():
        section, model = ROLES[role].section, {"ref": "reference"}.get(role, role)
        for name in ("ulysses_sequence_parallel_size", "ring_attention_size"):
            key = f"{section}.{name}"
            size, actor = get(config, key), get(config, f"actor_rollout_ref.actor.{name}")
            for why in reasons if size != actor else []:
                yield (
                    f"{key}={size}: with {why} actor and {model} share the devices of a sequence. Use {key}={actor}, "
                    "as the actor."
                )


def reasons_to_match_actor(config: Config) -> dict[Role, list[str]]:
    """Return the settings with which a model computes together with the actor, by role."""
    roles, distillation = config.actor_rollout_ref, config.distillation
    of_reference = {
        "actor_rollout_ref.actor.kl_loss_type=full": roles.actor.use_kl_loss and roles.actor.kl_loss_type == "full",
        "algorithm.kl_penalty=full": config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full",
        "LoRA": roles.model.uses_lora,
    }
    of_teacher = {f"loss_mode={distillation.distillation_loss.loss_mode}": distillation.compares_all}
    by_role: dict[Role, dict[str, bool]] = {"ref": of_reference, "teacher": of_teacher}
    return {role: [why for why, holds in reasons.items() if holds] for role, reasons in by_role.items()}
