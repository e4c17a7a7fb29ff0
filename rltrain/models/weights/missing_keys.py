"""Errors and notes about checkpoints in which weights are missing, or have unexpected names or sizes.

transformers would initialize such weights randomly and continue. Here each one is an error, raised from the headers of
the files before weights are read. The message suggests which part of the names to remove, because wrappers (FSDP, peft,
torch.compile) leave prefixes in files. Unused weights in the files are only a note.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch

from rltrain.common.errors import ConfigError
from rltrain.common.logs import count
from rltrain.models.files.entries import Entries
from rltrain.models.weights.key_mapping import KeyMapping

# Parts that wrappers add to names. The patterns match them anywhere, and at the beginning.
_WORDS = (
    r"(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module|_forward_module|base_model\.model|base_layer|"
    r"original_module|modules_to_save\.default|module)\."
)
_WRAPPERS, _WRAPPED = re.compile(rf"(?<![^.]){_WORDS}"), re.compile(rf"({_WORDS})+")
_ADAPTER = re.compile(r"(^|\.)lora_(A|B|embedding_A|embedding_B|magnitude_vector)\b")
# A critic or reward model loads the first of these heads separately and does not have the others.
_HEADS = re.compile(r"^(score\.weight$|(.*\.)?(lm_head|embed_out|output_layer)\.)")
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|(^|\.)position_ids|\.masked_bias|attn\.bias)$")
_NUM_SHOWN, _DEEPEST = 3, 3
# Number of rows that are compared at each of three positions of two weights.
_ROWS = 8


def refuse(key: str, entries: Entries, key_mapping: KeyMapping) -> None:
    """Raise ConfigError if a weight of the model is missing or wrong in the files. key: config key of the checkpoint,
    for the message."""
    for look in (_missing, _misfit, _adapters, _twice):
        if problem := look(entries, key_mapping):
            raise ConfigError(f"{key}={entries.path}: {problem}")


def notes(key: str, entries: Entries, key_mapping: KeyMapping) -> Iterator[str]:
    """Yield notes on unused weights in the files, and on harmless missing ones."""
    name, files = f"{key}={entries.path}", _files(entries)
    ignored = [*(key_mapping.plain._keys_to_ignore_on_load_unexpected or ()), _HEADS.pattern, _COMPUTED.pattern]
    if left := [entry for entry in key_mapping.left if not any(re.search(pattern, entry) for pattern in ignored)]:
        model = type(key_mapping.plain).__name__
        deeper = _of_layers(left, key_mapping)
        yield f"{name}: {model} does not take {count(len(left), 'weight')} of {files}: {_listed(left)}{deeper}"
    if key_mapping.computed:
        yield f"{name}: not in {files} and initialised by config.json: {_listed(key_mapping.computed)}"


def unknown_rule(key_mapping: KeyMapping) -> str | None:
    """Return why the shape of a weight cannot be determined although its entries exist, or None."""
    return next((why for why in (_shape(key_mapping, name)[1] for name in _with_entries(key_mapping)) if why), None)


def _missing(entries: Entries, key_mapping: KeyMapping) -> str | None:
    short = key_mapping.missing
    missing = key_mapping.in_files(short) if short else []
    for name in [] if short else _with_entries(key_mapping):
        shape, why = _shape(key_mapping, name)
        if why or shape != key_mapping.shapes[name]:  # an incomplete stack
            missing += [entry for entry in key_mapping.in_files([name]) if entry not in entries.empty]
            # A rule with several ways to build a weight does not name each entry, so `missing` may still be empty.
            short = [*short, name] if missing else short
    if not missing:
        return None
    total, model = key_mapping.total, type(key_mapping.plain).__name__
    number = f"all {total:,}" if len(short) == total else f"{len(short):,} of the {total:,}"
    return (
        f"{number} weights of {model} are missing in {_files(entries)}: {_listed(missing)}. Training would begin with "
        f"random numbers there. {_instead(entries, key_mapping)}"
    )


def _instead(entries: Entries, key_mapping: KeyMapping) -> str:
    """Return a probable cause of missing weights, and a fix."""
    left, again = key_mapping.left, "Copy the model again, or give the folder whose config.json belongs to its weights."
    if not left:
        return again
    tried = [(attempt, KeyMapping({rename(name): weight for name, weight in entries.empty.items()}, key_mapping.plain))
             for attempt, rename in _renamings(left)]  # fmt: skip
    attempt, fits = min(tried, key=lambda attempt: len(attempt[1].missing), default=("", key_mapping))
    if len(fits.missing) < len(key_mapping.missing):
        most = f"all but {len(fits.missing)} fit" if fits.missing else "fit"
        adapted = any(map(_ADAPTER.search, left)) or "base_layer" in attempt
        then = "Merge its adapters (peft: merge_and_unload) and save" if adapted else "Save"
        return f"{attempt} and {most} without it. {then} the model itself, not its wrapper."
    return f"It has {count(len(left), 'other name')} instead: {_listed(left)}. {again}"


def _renamings(left: list[str]) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Yield prefixes and infixes that a wrapper may have added, most likely first: (description, function that removes
    it)."""
    names = [name for name in left if not _ADAPTER.search(name)] or left
    starts = [Counter(match[0] for name in names if (match := _WRAPPED.match(name)))]
    parts = [name.split(".") for name in names]
    for depth in range(1, _DEEPEST + 1):
        starts.append(Counter(".".join(name_parts[:depth]) + "." for name_parts in parts if len(name_parts) > depth))
    for prefix, number in [pair for prefixes in starts for pair in prefixes.most_common(1)]:
        many = f"All {number}" if number == len(names) else f"{number} of {len(names)}"
        yield f"{many} other names start with {prefix}", partial(_without, prefix)
    if words := dict.fromkeys(word for name in names for word in _WRAPPERS.findall(name)):
        sentence = f"Other names, such as {names[0]}, have {'. and '.join(words)}. in them"
        yield sentence, partial(_WRAPPERS.sub, "")
        (prefix, _), *_ = Counter(_WRAPPERS.sub("", name).split(".")[0] + "." for name in names).most_common(1)
        yield f"{sentence}, start with {prefix}", partial(_without_all, prefix)


def _without(prefix: str, name: str) -> str:
    return name.removeprefix(prefix)


def _without_all(prefix: str, name: str) -> str:
    return _WRAPPERS.sub("", name).removeprefix(prefix)


def _misfit(entries: Entries, key_mapping: KeyMapping) -> str | None:
    shapes = ((name, _shape(key_mapping, name)[0]) for name in _with_entries(key_mapping))
    wrong = {name: shape for name, shape in shapes if shape not in (None, key_mapping.shapes[name])}
    if not wrong:
        return None
    name, stored_shape = next(iter(wrong.items()))
    entry, model = key_mapping.entries(name)[0][0], type(key_mapping.plain).__name__
    return (
        f"{count(len(wrong), 'weight')} of {_files(entries)} do not have the sizes of config.json: {entry} makes "
        f"{list(stored_shape or ())}, and {name} of {model} is {list(key_mapping.shapes[name])}. Give the config.json "
        "that belongs to these weights."
    )


def _adapters(entries: Entries, key_mapping: KeyMapping) -> str | None:
    left = [name for name in key_mapping.left if _ADAPTER.search(name)]
    if not left:
        return None
    return (
        f"adapters in {_files(entries)} are not merged, so training would ignore them: {_listed(left)}. Merge them "
        "(peft: merge_and_unload) and save the model again."
    )


def _twice(entries: Entries, key_mapping: KeyMapping) -> str | None:
    """Return the problem of two entries with different numbers for one weight, or None."""
    for name in entries.differing():
        files = " and ".join(file.name for file in entries.files[name])
        return f"{name} has different values in {files}. Keep the right one."
    for first, second in key_mapping.twice():
        if entries.empty[first].shape == entries.empty[second].shape and _same(entries, first, second):
            continue
        return (
            f"{first} and {second} are one weight of {type(key_mapping.plain).__name__} (tie_word_embeddings, if one "
            f"is the head), but {_files(entries)} have different values for them. Remove the wrong one, or set "
            "tie_word_embeddings to false in config.json."
        )
    return None


def _same(entries: Entries, first: str, second: str) -> bool:
    last = entries.empty[first].shape[0] if entries.empty[first].dim() else 0
    starts = {0, max(last // 2 - _ROWS, 0), max(last - _ROWS, 0)}
    pairs = ([entries.rows(name, at, at + _ROWS).float() for name in (first, second)] for at in starts)
    return all(torch.allclose(rows, rows_of_second, 0.0, 0.0, equal_nan=True) for rows, rows_of_second in pairs)


def _with_entries(key_mapping: KeyMapping) -> Iterator[str]:
    """Return the weights that have an entry."""
    return (name for name in key_mapping.shapes if key_mapping.home.get(name, name) in key_mapping.parts)


def _shape(key_mapping: KeyMapping, name: str) -> tuple[tuple[int, ...] | None, str | None]:
    """Return a weight's shape, or the reason why it is unknown."""
    try:
        return key_mapping.shape(name), None
    except Exception as error:  # noqa: BLE001 - after any error of a rule, transformers reads the model itself
        return None, f"{name} is not made of {key_mapping.entries(name)[0][0]} as known: {error!r}"


def _of_layers(left: list[str], key_mapping: KeyMapping) -> str:
    """Return a note if the files have more layers than config.json."""
    numbers = [int(match[1]) for name in left if (match := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name))]
    depth = getattr(key_mapping.plain.config.get_text_config(), "num_hidden_layers", None)
    if not depth or not numbers or max(numbers) < depth:
        return ""
    return f" config.json has {depth} layers (num_hidden_layers), and the files have {max(numbers) + 1}."


def _files(entries: Entries) -> str:
    names = [file.name for file in entries.paths]
    return names[0] if len(names) == 1 else f"its {len(names)} files ({names[0]}, …)"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NUM_SHOWN]) + (", …" if len(names) > _NUM_SHOWN else "")
