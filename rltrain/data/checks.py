"""Checks of files and rows in verl's parquet schema."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from rltrain.common.errors import DataError, short

# Column of videos, as in verl's files, whose key data.video_key has no effect.
VIDEOS = "videos"


@dataclass(frozen=True)
class Keys:
    """Columns of the prompt, the data source and the images (``data.prompt_key``, ``data.reward_fn_key``,
    ``data.image_key``).
    """

    prompt: str = "prompt"
    source: str = "data_source"
    # The field is excluded from the repr, which is part of fingerprints, because the content of images is hashed per
    # row.
    image: str = field(default="images", repr=False)

    def required(self) -> tuple[str, ...]:
        """Return the required columns of verl's files."""
        return (self.prompt, self.source, "reward_model")

    def optional(self) -> tuple[str, ...]:
        """Return the columns that are read if they exist."""
        return ("ability", "extra_info", "agent_name")


def check_names(path: str, names: Sequence[str]) -> None:
    """Raise DataError if two columns of a file have the same name, because only one of them would be read."""
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DataError(
            f"{path!r} has {names.count(twice[0])} columns named {twice[0]!r}. Rename or drop all but one of them."
        )


def check_columns(path: str, names: Sequence[str], keys: Keys) -> None:
    """Raise DataError if a column is missing or appears twice."""
    read = {*keys.required(), *keys.optional(), VIDEOS, keys.image}
    check_names(path, [name for name in names if name in read])
    missing = [name for name in keys.required() if name not in names]
    column_names = short(", ".join(map(repr, names)) or "none", 300)
    if missing:
        hint = "" if keys.prompt not in missing else " Or name its prompt column with data.prompt_key=NAME."
        raise DataError(
            f"{path!r} has no column {', '.join(map(repr, missing))}; it has {column_names}. "
            f"A verl file holds {', '.join(map(repr, keys.required()))}; "
            f"python -m rltrain.data_preprocess.jsonl --input {path} converts other columns (see --help).{hint}"
        )
    if keys.image != "images" and keys.image not in names:
        raise DataError(f"{path!r} has no column data.image_key={keys.image!r}; it has {column_names}.")


def check_schema(path: str, schema: pa.Schema, keys: Keys) -> None:
    """Raise DataError if a parquet file lacks a column, or if ground truth or images have the wrong type."""
    names = list(schema.names)
    check_columns(path, names, keys)
    reward = schema.field("reward_model").type
    if not pa.types.is_struct(reward) or reward.get_field_index("ground_truth") < 0:
        raise DataError(
            f"{path!r}: column 'reward_model' is {short(reward)}; it must be a struct such as "
            "{'style': 'rule', 'ground_truth': '72'}."
        )
    if keys.image in names and not _holds_images(schema.field(keys.image).type):
        raise DataError(
            f"{path!r}: column {keys.image!r} is {short(schema.field(keys.image).type)}; it must hold images, each "
            "{'bytes': the file} or {'path': its name}, and be named by data.image_key."
        )
    if VIDEOS in names and not _holds_images(schema.field(VIDEOS).type):
        raise DataError(
            f"{path!r}: column {VIDEOS!r} is {short(schema.field(VIDEOS).type)}; it must hold videos, each "
            "{'video': the name of its file, or a list of images}."
        )


def _holds_images(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    tests = (pa.types.is_struct, pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
             pa.types.is_large_binary, pa.types.is_null)  # fmt: skip
    return any(test(kind) for test in tests)


def row_problem(record: dict[str, Any], keys: Keys) -> str | None:
    """Return the problem of a row, or None."""
    source, reward = record[keys.source], record["reward_model"]
    of_reward = reward if isinstance(reward, dict) else {}
    style, truth = of_reward.get("style"), of_reward.get("ground_truth")
    ability, extra, agent = record.get("ability"), record.get("extra_info"), record.get("agent_name")
    fields = (
        (keys.source, source, isinstance(source, str) and source, "a name such as 'openai/gsm8k'"),
        ("reward_model", reward, isinstance(reward, dict), "{'style': 'rule', 'ground_truth': …}"),
        ("reward_model.style", style, isinstance(style, str | None), "text: 'rule' or 'model'"),
        (
            "reward_model.ground_truth",
            truth,
            truth is not None or style == "model",
            "the right answer, or style 'model'",
        ),
        ("ability", ability, isinstance(ability, str | None), "text or null"),
        ("extra_info", extra, isinstance(extra, dict | None), "a struct such as {'index': 0}"),
        ("agent_name", agent, isinstance(agent, str | None), "text, such as tool_agent, or null"),
        *_fields_of_tools(extra if isinstance(extra, dict) else {}),
    )
    wrong = (
        f"field {name!r} is {_short(value)}; it must be {wanted}."
        for name, value, is_valid, wanted in fields
        if not is_valid
    )
    return _prompt_problem(record[keys.prompt], keys.prompt) or next(wrong, None)


def _fields_of_tools(extra: dict[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    kwargs, selection = extra.get("tools_kwargs"), extra.get("tool_selection")
    are_names = isinstance(selection, list) and all(isinstance(name, str) for name in selection)
    yield "extra_info.tool_selection", selection, selection is None or are_names, "a list of names of tools"
    nested = kwargs.values() if isinstance(kwargs, dict) else [kwargs]
    is_valid = all(isinstance(value, dict | None) for value in nested)
    yield "extra_info.tools_kwargs", kwargs, is_valid, "{NAME of a tool: {'create_kwargs': {…}, 'execute_kwargs': {…}}}"


def _prompt_problem(prompt: Any, name: str) -> str | None:
    if isinstance(prompt, str):
        # A string is not silently wrapped in a message, because it has often been formatted by a chat template already.
        wanted = "a list of messages: [{'role': 'user', 'content': the text}]"
        return f"field {name!r} is a plain string; it must be {wanted}."
    if not isinstance(prompt, list) or not prompt:
        return f"field {name!r} is {_short(prompt)}; it must be a non-empty list of messages."
    for number, message in enumerate(prompt):
        where = f"field '{name}[{number}]"
        if not isinstance(message, dict):
            return f"{where}' is {_short(message)}; it must be {{'role': …, 'content': …}}."
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            return f"{where}.role' is {_short(role)}; it must be 'system', 'user', 'assistant' or 'tool'."
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            return f"{where}.content' is {_short(content)}; it must be text."
    return None


def _short(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '…'}"
