"""Keys and defaults of verl's SFT trainer, as arguments of ``rltrain train``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rltrain.common.errors import ConfigError
from rltrain.config.schema.keys import is_known
from rltrain.config.verl.hydra import compose
from rltrain.config.verl.keys import leaves_of, rename

_A, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
# Defaults of verl's SFT trainer where they differ, and one optimizer step per batch. No engine's package is needed.
_DEFAULTS: dict[str, Any] = {
    "sft.enabled": True,
    "actor_rollout_ref.rollout.name": "hf",
    _A + "ppo_mini_batch_size": "${data.train_batch_size}",
    _A + "optim.lr": 1e-5,
    _A + "optim.lr_warmup_steps_ratio": 0.1,
    _A + "optim.lr_scheduler_type": "cosine",
    _A + "optim.betas": [0.9, 0.95],
    "data.train_batch_size": 256,
    "trainer.total_epochs": 4,
    "trainer.samples_freq": -1,
}
# Keys of verl's SFT trainer -> keys here.
_RENAMED = {
    "model.partial_pretrain": _M + "path",
    "model.strategy": _A + "strategy",
    "model.fsdp_config.cpu_offload": _A + "fsdp_config.param_offload",
    "model.fsdp_config.offload_params": _A + "fsdp_config.optimizer_offload",
    "optim.lr_scheduler": _A + "optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": _A + "optim.lr_warmup_steps_ratio",
    "ulysses_sequence_parallel_size": _A + "ulysses_sequence_parallel_size",
    "engine.ulysses_sequence_parallel_size": _A + "ulysses_sequence_parallel_size",
    "engine.strategy": _A + "strategy",
    "data.micro_batch_size_per_gpu": _A + "ppo_micro_batch_size_per_gpu",
    "data.max_token_len_per_gpu": _A + "ppo_max_token_len_per_gpu",
    "data.use_dynamic_bsz": _A + "use_dynamic_bsz",
    "data.chat_template": _M + "custom_chat_template",
    "data.multiturn.messages_key": "sft.messages_key",
    "data.messages_key": "sft.messages_key",
    "data.multiturn.tools_key": "sft.tools_key",
    "data.tools_key": "sft.tools_key",
    "data.response_key": "sft.response_key",
    "trainer.seed": "data.seed",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
}
# Sections of verl's SFT trainer -> sections here.
_SECTIONS = {"model.fsdp_config.": _A + "fsdp_config.", "engine.": _A + "fsdp_config.", "model.": _M}
_SECTIONS |= {"optim.": _A + "optim."}
# Keys of verl's SFT trainer without effect: packing, several turns and balanced ranks are always on.
_ALWAYS = (
    "use_remove_padding", "data.multiturn.enable", "data.balance_dp_token", "data.pad_mode", "model.use_remove_padding",
    "data.micro_batch_size", "data.use_shm", "model.use_shm", "data.num_workers",
)  # fmt: skip
_DICT_KEYS = {"data.prompt_dict_keys": "data.prompt_key", "data.response_dict_keys": "sft.response_key"}


def as_training(words: str | Path | Mapping[str, Any] | Sequence[str]) -> Iterator[str]:
    """Yield the arguments of ``rltrain train`` for arguments of this command, a file or a mapping of settings.

    Raises ConfigError for a bad file.
    """
    settings = {key: json.dumps(value) for key, value in _DEFAULTS.items()}
    if isinstance(words, Mapping):
        settings |= _as_text(words)
        words = []
    flags: list[str] = []
    rest = iter(["--config", str(words)] if isinstance(words, str | Path) else words)
    for word in rest:
        if word == "--config":
            settings |= _as_text(compose(Path(next(rest, ""))))
        elif word.startswith("-") or "=" not in word:
            flags.append(word)
        else:
            key, _, text = word.partition("=")
            settings[key.lstrip("+")] = text
    yield from (f"{key}={text}" for key, text in translated(settings).items())
    yield from flags


def _as_text(tree: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in leaves_of(tree)}


def translated(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings with keys of ``rltrain train``. Later settings win.

    Raises ConfigError for a bad length and for a mistyped key of verl's SFT trainer.
    """
    found: dict[str, str] = {}
    # Keys that name a field of a column come after the key of the column.
    for key, text in sorted(settings.items(), key=lambda item: item[0] in _DICT_KEYS):
        if key in _ALWAYS:
            continue
        if key == "data.max_length":
            if not text.isdecimal() or int(text) < 2:
                raise ConfigError(f"data.max_length={text}: give a number of tokens, at least 2.")
            # verl's key limits prompt and response together, and here the sum of these two keys does so.
            found |= {"data.max_prompt_length": "1", "data.max_response_length": str(int(text) - 1)}
            continue
        if key in _DICT_KEYS:
            column = _DICT_KEYS[key]
            inner = text.strip("[]\"' ").replace('"', "").replace("'", "")
            found[column] = f"{found.get(column, column.rpartition('.')[2].removesuffix('_key'))}.{inner}"
            continue
        section = next((name for name in _SECTIONS if key.startswith(name)), "")
        name = _RENAMED.get(key) or (_SECTIONS[section] + key.removeprefix(section) if section else key)
        names = [] if is_known(rename(name)) else [*_RENAMED, *_DICT_KEYS, "data.max_length"]
        if key not in names and (near := get_close_matches(key, names, n=1, cutoff=0.9)):
            raise ConfigError(f"unknown key '{key}'. Did you mean {near[0]}?")
        found.pop(name, None)
        found[name] = text
    return found
