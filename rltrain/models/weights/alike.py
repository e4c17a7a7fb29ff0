"""Whether the weights of two models mean the same: one architecture, one tokenizer.

Numbers of equal shapes can be averaged whatever they are, and nothing of the result would say so. Left out: whether two
models have come from one, without which an average of them is of no use; only a score of it can tell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rltrain.base.errors import CheckpointError, short

# Of a configuration: what says how it was saved, how it is served, or what training alone reads.
_NO_MATTER = {
    "transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "max_position_embeddings", "initializer_range", "output_attentions", "output_hidden_states", "return_dict",
    "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "is_encoder_decoder", "architectures",
}  # fmt: skip
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def refuse_other_config(first: tuple[str, Mapping[str, Any]], other: tuple[str, Mapping[str, Any]]) -> None:
    """Raise CheckpointError where two configurations (each with its path) are of other architectures."""
    one, two = dict(_leaves(first[1])), dict(_leaves(other[1]))
    odd = [name for name in sorted(one.keys() | two.keys()) if one.get(name) != two.get(name)]
    if odd:
        values = "; ".join(f"{name} is {short(one.get(name))} and {short(two.get(name))}" for name in odd[:3])
        more = f" ({len(odd)} settings differ)" if len(odd) > 3 else ""
        raise CheckpointError(
            f"{first[0]} and {other[0]} are of other architectures: {values}{more}. Average models that were trained "
            "from one."
        )


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if name.startswith("_") or name in _NO_MATTER or "dropout" in name:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def refuse_other_tokenizer(first: Path, other: Path) -> str:
    """Raise CheckpointError where two folders have other tokenizers. Returns what is said where that cannot be told."""
    kinds = [[name for name in _TOKENIZERS if (folder / name).is_file()] for folder in (first, other)]
    if not all(kinds):
        lacking = first if not kinds[0] else other
        return f"{lacking} has no tokenizer, so it is not compared" if any(kinds) else ""
    common = [name for name in kinds[0] if name in kinds[1]]
    if not common:
        return f"{first} has {kinds[0][0]} and {other} has {kinds[1][0]}, so their tokenizers are not compared"
    same = _tokens(first / common[0]) == _tokens(other / common[0])
    if not same:
        raise CheckpointError(
            f"{first} and {other} have other tokenizers ({common[0]}), so their weights belong to other tokens. "
            "Average models that were trained from one."
        )
    return ""


def _tokens(file: Path) -> Any:
    """What of a tokenizer's file says which token is which: versions of libraries write the rest in other ways."""
    if file.name != "tokenizer.json":
        return file.read_bytes()
    try:
        content = json.loads(file.read_text("utf-8"))
        model, added = content["model"], content.get("added_tokens") or ()
        merges = [
            tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model.get("merges", ())
        ]
        return model["vocab"], merges, sorted((token["id"], token["content"]) for token in added)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error!r}). Copy it again.") from error


def differing_small_files(first: Path, other: Path) -> list[str]:
    """Those that say how a model is served, and are not the same in both folders."""
    names = ("generation_config.json", "chat_template.jinja", "preprocessor_config.json")
    pairs = ((name, first / name, other / name) for name in names)
    return [name for name, one, two in pairs if two.is_file() and not (one.is_file() and _same(one, two))]


def _same(first: Path, other: Path) -> bool:
    texts = [file.read_text("utf-8") for file in (first, other)]
    if first.suffix != ".json":
        return texts[0] == texts[1]
    contents = [json.loads(text) for text in texts]
    for content in contents:
        content.pop("transformers_version", None)
    return bool(contents[0] == contents[1])
