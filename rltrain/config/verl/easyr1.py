"""A configuration of EasyR1's, a fork of verl with names and defaults of its own, as settings of ours.

`easyr1_keys` says what becomes of each key; here is how its tables are read, and what several keys say together. Every
key is carried over, refused, or said to be without effect, by its own name. What is left out has EasyR1's default where
the table gives one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from rltrain.config.schema import Config
from rltrain.config.schema.conditions import as_text, parse
from rltrain.config.schema.keys import get, is_known
from rltrain.config.verl.easyr1_keys import DEFAULTS, KEYS, NO_EFFECT, REFUSED, TOGETHER, VALUES
from rltrain.config.verl.keys import applies, rename, rows_of, verdict

_A, _R, _V = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.rollout.val_kwargs."
_OVERRIDE = "worker.rollout.val_override_config."
# How its keys begin; others are taken as ours.
_OWN = ("data.", "algorithm.", "worker.", "trainer.")


def is_easyr1(settings: Mapping[str, Any]) -> bool:
    """Whether the dotted keys are those of EasyR1, which alone has them below ``worker``."""
    return any(key.startswith(("worker.actor.", "worker.rollout.", "worker.reward.")) for key in settings)


def is_key(key: str) -> bool:
    """Whether a key is EasyR1's, and not one of ours by the same name."""
    patterns = (*TOGETHER, *(parse(row).key for row in (*NO_EFFECT, *REFUSED)), *KEYS)
    return key.startswith(_OWN) and any(fnmatchcase(key, pattern) for pattern in patterns)


@dataclass
class Reading:
    """A configuration of EasyR1's, read as ours."""

    theirs: Mapping[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    """Our key -> value."""
    why: dict[str, str] = field(default_factory=dict)
    """Our key -> what is to be said of it."""
    was: dict[str, str] = field(default_factory=dict)
    """Our key -> theirs, where it was written."""
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Both: what is to be said of keys that are not carried over."""

    def value(self, key: str, default: Any = None) -> Any:
        """What was written, or EasyR1's default."""
        written = self.theirs.get(key)
        return DEFAULTS.get(key, default) if written is None else written

    def put(self, key: str, value: Any, *of: str) -> None:
        """Set a key of ours for what ``of``, keys of theirs, say."""
        written = [their_key for their_key in of if self.theirs.get(their_key) is not None]
        if not written and is_known(key) and get(Config(), key) == value:
            return
        self.settings[key] = value
        if not written:
            self.why[key] = "EasyR1's default"
        elif key not in written:
            self.why[key] = "was " + ", ".join(
                f"{their_key}={as_text(self.theirs[their_key])}" for their_key in written
            )
            self.was[key] = written[0]

    def defaulted(self) -> str:
        """One sentence about the settings that nobody wrote."""
        names = [f"{key}={as_text(self.settings[key])}" for key, why in self.why.items() if key not in self.was]
        return f"EasyR1's defaults count where the file says nothing: {', '.join(names)}" if names else ""

    def carry_over(self, key: str, value: Any) -> None:
        """Carry over one key by the tables."""
        if any(fnmatchcase(key, pattern) for pattern in TOGETHER):
            return
        if rows := [*rows_of(key, NO_EFFECT), *rows_of(key, REFUSED)]:
            row, condition, why = rows[0]
            if applies(condition, value) and row in NO_EFFECT:
                self.notes.append(f"{key}: no effect: {why}")
            elif applies(condition, value):
                self.refused.append(f"{key}={as_text(value)}: {why}.")
            return
        table = next((replacements for pattern, replacements in VALUES.items() if fnmatchcase(key, pattern)), {})
        turned = table.get(value, value) if isinstance(value, str | int) else value
        if turned is None or turned == {}:
            return
        own_key = self._ours(key)
        if own_key is None or not (is_known(rename(own_key)) or verdict(own_key, value) or not key.startswith(_OWN)):
            self.refused.append(f"{key}={as_text(value)}: nothing here does what this key of EasyR1's asks for.")
            return
        self.put(own_key, turned, key)

    def _ours(self, key: str) -> str | None:
        for pattern, own_key in KEYS.items():
            if pattern == key:
                return own_key
            if pattern.endswith("*") and key.startswith(pattern[:-1]):
                return own_key.removesuffix("*") + key[len(pattern) - 1 :]
        return key if is_known(key) or not key.startswith(_OWN) else None


def read(theirs: Mapping[str, Any]) -> Reading:
    """The settings of ours that ``theirs``, by dotted keys, stand for."""
    reading = Reading(theirs)
    for key, value in {**DEFAULTS, **theirs}.items():
        reading.carry_over(key, value)
    _read_together(reading)
    return reading


def _read_together(of: Reading) -> None:
    _kl(of)
    for role, section, passes in (("actor", _A, (_R, "actor_rollout_ref.ref.")), ("critic", "critic.", ())):
        if role == "actor" or of.value("algorithm.adv_estimator") == "gae":
            _sizes(of, f"worker.{role}.", section, passes)
    _validation(of)
    _filtering(of)
    _offload(of)
    _precision(of)
    _data(of)
    _reward(of)


def _kl(of: Reading) -> None:
    coef, kind = "algorithm.kl_coef", "algorithm.kl_penalty"
    if of.value("algorithm.disable_kl", False):
        of.notes.append("algorithm.disable_kl: there is no KL here unless it is asked for")
    elif of.value("algorithm.use_kl_loss", False):
        of.put(_A + "use_kl_loss", True, "algorithm.use_kl_loss")
        of.put(_A + "kl_loss_coef", of.value(coef), coef)
        of.put(_A + "kl_loss_type", of.value(kind), kind)
    else:
        of.put("algorithm.use_kl_in_reward", True, "algorithm.use_kl_loss")
        of.put("algorithm.kl_ctrl.kl_coef", of.value(coef), coef)
        of.put(kind, of.value(kind), kind)
        if of.value("algorithm.kl_type") == "adaptive":
            for their, leaf, default in (
                ("type", "type", ""),
                ("horizon", "horizon", 10000),
                ("target", "target_kl", 0.1),
            ):
                of.put(f"algorithm.kl_ctrl.{leaf}", of.value(f"algorithm.kl_{their}", default), f"algorithm.kl_{their}")


def _sizes(of: Reading, role: str, section: str, passes: tuple[str, ...]) -> None:
    """Micro-batches: by tokens with its dynamic batching, which is on by default."""
    update, experience = (f"{role}micro_batch_size_per_device_for_{phase}" for phase in ("update", "experience"))
    dynamic = f"{role}dynamic_batching"
    lengths = ("data.max_prompt_length", "data.max_response_length")
    # Lengths that the user's shell knows alone cannot be added up.
    numbers = all(isinstance(of.value(key), int) for key in (*lengths, update, experience))
    tokens = bool(of.value(dynamic, True)) and numbers
    name = "max_token_len_per_gpu" if tokens else "micro_batch_size_per_gpu"
    factor = sum(of.value(key) for key in lengths) if tokens else 1
    of.put(f"{section}use_dynamic_bsz", tokens, dynamic)
    of.put(f"{section}ppo_{name}", of.value(update) * factor, update, *lengths)
    for pass_section in passes:
        if pass_section == _R or not of.value("algorithm.disable_kl", False):
            of.put(f"{pass_section}log_prob_{name}", of.value(experience) * factor, experience, *lengths)
    if not passes:
        of.put(f"{section}forward_{name}", of.value(experience) * factor, experience, *lengths)


def _validation(of: Reading) -> None:
    """It validates as it trains, but for what is overridden; here validation is greedy unless told."""
    if not of.value("data.val_files"):
        return
    for option in ("temperature", "top_p", "top_k", "n"):
        default = 1 if option == "n" else of.value(f"worker.rollout.{option}")
        value = of.value(_OVERRIDE + option, default)
        if value is not None:
            of.put(_V + option, value, _OVERRIDE + option)
    of.put(_V + "do_sample", of.settings.get(_V + "temperature") != 0, _OVERRIDE + "temperature")
    for key, value in of.theirs.items():
        name = key.removeprefix(_OVERRIDE)
        if name != key and name not in ("temperature", "top_p", "top_k", "n"):
            of.refused.append(f"{key}={value}: use one of temperature, top_p, top_k, n.")


def _filtering(of: Reading) -> None:
    low, high, size = "algorithm.filter_low", "algorithm.filter_high", "data.mini_rollout_batch_size"
    if not of.value("algorithm.online_filtering", False):
        if of.value(size):
            of.notes.append(f"{size}: no effect: a step's prompts are generated at once")
        return
    if (of.value(low), of.value(high)) != (0.01, 0.99):
        of.refused.append(
            f"{low}={of.value(low)}, {high}={of.value(high)}: groups are left out here whose answers all score alike, "
            "which is the same for scores of 0 and 1 with 0.01 and 0.99 alone. Leave both keys out if that is meant."
        )
    name = of.value("algorithm.filter_key")
    of.put("algorithm.filter_groups.enable", True, "algorithm.online_filtering")
    of.put("algorithm.filter_groups.metric", {"overall": "score"}.get(name, name), "algorithm.filter_key")
    rounds = "trainer.max_try_make_batch"
    of.put("algorithm.filter_groups.max_num_gen_batches", of.value(rounds), rounds)
    if of.value(size):
        of.put("data.gen_batch_size", of.value(size), size)


def _offload(of: Reading) -> None:
    for role, section in (("actor", _A), ("ref", "actor_rollout_ref.ref."), ("critic", "critic.model.")):
        keys = [f"worker.{role}.{ending}" for ending in ("fsdp.enable_cpu_offload", "offload.offload_params")]
        if moved := [key for key in keys if of.value(key, False)]:
            of.put(f"{section}fsdp_config.param_offload", True, *moved)


def _precision(of: Reading) -> None:
    for role in ("actor", "critic"):
        key, types = f"worker.{role}.optim.strategy", f"worker.{role}.fsdp.torch_dtype"
        kind = of.value(key, "adamw")
        if kind == "adamw_bf16" and of.value(types) in ("bf16", "bfloat16"):
            of.notes.append(f"{key}: no effect: AdamW keeps its moments in the type of the weights")
        elif kind != "adamw":
            of.refused.append(
                f"{key}={kind}: the optimizer is AdamW, with moments in the type of the weights. Set {types}=bf16 "
                f"too, or {key}=adamw."
            )


def _data(of: Reading) -> None:
    """Files: verl's columns stand in them here, and a template is applied when they are made."""
    files = {key: of.value(key) for key in ("data.train_files", "data.val_files")}
    prompt, answer, images = (of.value(f"data.{name}_key", name) for name in ("prompt", "answer", "image"))
    key_names = ("prompt_key", "answer_key", "image_dir", "format_prompt")
    written = [f"data.{name}={of.theirs[f'data.{name}']}" for name in key_names if of.theirs.get(f"data.{name}")]
    hub = [f"{key}={value}" for key, value in files.items() if isinstance(value, str) and "@" in value]
    if written or hub:
        template = of.value("data.format_prompt")
        words = f" --instruction 'the words of {template}'" if template else ""
        of.refused.append(
            f"{', '.join(hub + written)}: files have verl's columns here, and a template is part of the prompt. Make "
            f"them of FILE, which is {files['data.train_files']} as parquet or jsonl: rltrain data jsonl --input FILE "
            f"--prompt-column {prompt} --answer-column {answer} --data-source math_dapo{words} --output DIR (with "
            f"images: --image-column {images}). Then set data.train_files=DIR/train.parquet "
            "data.val_files=DIR/test.parquet, and to null what else is named here."
        )
    for key, value in files.items():
        if value and f"{key}={value}" not in hub:
            of.put(key, value, key)


def _reward(of: Reading) -> None:
    keys = [f"worker.reward.{ending}" for ending in ("reward_function", "score_function", "compute_score")]
    for key in (candidate for candidate in keys if of.value(candidate)):
        file, _, name = str(of.value(key)).partition(":")
        if of.value("custom_reward_function.path"):
            of.notes.append(f"{key}: no effect: custom_reward_function.path is set")
            continue
        options = ", **options" if any(".reward_function_kwargs." in their_key for their_key in of.theirs) else ""
        call = '{"response": solution_str, "ground_truth": ground_truth}'
        is_sequential = of.value("worker.reward.reward_type") == "sequential"
        call = f"({call}{options})" if is_sequential else f"([{call}]{options})[0]"
        of.refused.append(
            f"{key}={of.value(key)}: a reward function is called otherwise here. Write FILE.py with the lines: import "
            f'runpy; theirs = runpy.run_path("{file}")["{name or "main"}"]; def compute_score(data_source, '
            f"solution_str, ground_truth, extra_info=None{options}): found = theirs{call}; return "
            '{"score": found["overall"], **found}. Then set custom_reward_function.path=FILE.py.'
        )
