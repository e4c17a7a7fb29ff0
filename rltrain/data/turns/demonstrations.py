"""Demonstrations for supervised fine-tuning: rows of conversations, and their tokens with a mask of assistant turns.

Problem: a model that is trained on a rendered conversation may learn other tokens than it samples later, because a
template may render past turns differently (it drops their reasoning, or ends them otherwise). Choice: the tokens equal
a rollout in which the policy writes the assistant's turns. Each turn is rendered after the generation prompt and ends
with its end token, and `TurnDelta` writes the tokens between turns. Videos, images after the prompt, and token ids or
masks from the data are not supported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np

from rltrain.common.errors import DataError, short
from rltrain.config.check import as_list
from rltrain.config.schema import DataConfig, SFTConfig
from rltrain.data.chat import ChatEncoder, Message
from rltrain.data.images import with_parts
from rltrain.data.media.videos import count_media
from rltrain.data.prompts import PromptStore, Responses
from rltrain.data.rows import Rows, first_lines, keys_of, rows_of, without_nulls
from rltrain.data.tables import draw_rows, plain_records
from rltrain.data.turns.calls import Call
from rltrain.data.turns.detect import detect_format
from rltrain.data.turns.formats.families import NO_CALLS
from rltrain.data.turns.turn_delta import TurnDelta

_CHUNK_ROWS = 512
# Fields of extra_info.
_TURNS, _TOOLS = "turns", "tools"


def read_demonstrations(files: Any, sft: SFTConfig, data: DataConfig, max_rows: int) -> Rows:
    """Read conversations as rows: ``prompt`` up to the first assistant turn, the other messages in ``extra_info``.

    A row has ``sft.messages_key`` (roles system, user, assistant, tool), or ``data.prompt_key`` (text or messages) and
    ``sft.response_key`` (text). A dot in a key selects a field of a column. max_rows: 0 or less means all; others are
    drawn by ``data.seed``. Raises DataError, which names file, row and fix.
    """
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    origins: list[str] = []
    for path in as_list(files):
        for name, number, record in plain_records(path):
            try:
                records.append(_as_row(record, name, sft, data))
                origins.append(f"{name!r} row {number}")
            except DataError as error:
                problems.append(f"{name!r} row {number}: {error}")
    if problems:
        raise DataError(first_lines(f"{len(problems)} rows cannot be used:", problems))
    numbers = draw_rows(len(records), max_rows, data.seed if data.shuffle else None)
    return rows_of([records[number] for number in numbers], ", ".join(as_list(files)), numbers, keys=keys_of(data))


def _as_row(record: Mapping[str, Any], path: str, sft: SFTConfig, data: DataConfig) -> dict[str, Any]:
    """Return a row in verl's schema."""
    messages = _messages(record, sft, data)
    places = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    if not places:
        raise DataError("it has no assistant turn, so there is nothing to learn. Remove the row.")
    first = places[-1] if sft.turns == "last" else places[0]
    if not first:
        raise DataError("it begins with an assistant turn; a message of role user or system must come before it.")
    extra = {_TURNS: messages[first : places[-1] + 1], _TOOLS: _tools(field_of(record, sft.tools_key), sft.tools_key)}
    return {
        data.prompt_key: messages[:first],
        data.reward_fn_key: str(record.get(data.reward_fn_key) or "sft"),
        "reward_model": {"style": "rule", "ground_truth": str(messages[places[-1]].get("content") or "")},
        "extra_info": extra,
        data.image_key: record.get(data.image_key),
    }


def _tools(value: Any, key: str) -> list[dict[str, Any]]:
    """Return the JSON schemas of a row's tools, which may be JSON text. Raises DataError."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = value
    if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or ()):
        raise DataError(f"{key} is {short(repr(value), 60)}; it must be a list of JSON schemas, or its JSON text.")
    return tools or []


def _messages(record: Mapping[str, Any], sft: SFTConfig, data: DataConfig) -> list[Message]:
    messages = field_of(record, sft.messages_key)
    if messages is None:
        prompt, response = field_of(record, data.prompt_key), field_of(record, sft.response_key)
        if prompt is None or not isinstance(response, str):
            raise DataError(
                f"it has neither sft.messages_key={sft.messages_key} nor data.prompt_key={data.prompt_key} with "
                f"sft.response_key={sft.response_key}; its columns are {short(', '.join(record), 200)}."
            )
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages = [*asked, {"role": "assistant", "content": response}]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise DataError(f"{sft.messages_key} is not a list of messages: [{{'role': 'user', 'content': the text}}, …].")
    cleaned: list[Message] = [without_nulls(message) for message in messages]
    return [message if "content" in message else {"content": "", **message} for message in cleaned]


def field_of(record: Any, name: str) -> Any:
    """Return a column, or with ``a.b`` field b of column a; None if it does not exist."""
    if name in record:
        return record[name]
    return reduce(lambda value, part: value.get(part) if isinstance(value, dict) else None, name.split("."), record)


def encode_demonstrations(
    rows: Rows, encoder: ChatEncoder, max_length: int, filter_overlong: bool, truncation: str
) -> PromptStore:
    """Encode prompts and responses of at most ``max_length`` tokens together.

    A longer row is dropped with ``filter_overlong``, loses its last tokens with ``truncation`` "right", and is an error
    otherwise. Continue with ``rows.select(store.row_index)``, as after `encode_prompts`. Raises DataError, which names
    file and row.
    """
    writer = cache(lambda tools: _TurnWriter(encoder, json.loads(tools)))
    prompts: list[np.ndarray] = []
    responses: list[tuple[np.ndarray, np.ndarray]] = []
    counts, row_index, problems, overlong = [], [], list[str](), list[tuple[int, int]]()
    for position, (row, num_images) in enumerate(_tried(rows, encoder)):
        tools = json.dumps(row.extra_info.get(_TOOLS) or [])
        try:
            sizes = [encoder.bounded_size(size) for size in rows.image_sizes(position)] if num_images else []
            prompt, num_rows, num_tokens = encoder.expand([row.prompt], [sizes], json.loads(tools))[0]
            tokens, mask = writer(tools).response(with_parts(row.prompt, *count_media(sizes)), row.extra_info[_TURNS])
        except DataError as error:
            problems.append(f"{rows.origin(position)}: {error}")
            continue
        length = len(prompt) + len(tokens)
        if length > max_length and (filter_overlong or truncation != "right" or len(prompt) >= max_length):
            overlong.append((position, length))
            continue
        # Tokens after the assistant's last token are dropped, because a rollout ends there too.
        end = int(np.flatnonzero(mask[: max_length - len(prompt)]).max(initial=-1)) + 1
        tokens, mask = tokens[:end], mask[:end]
        if not len(tokens):
            overlong.append((position, length))
            continue
        prompts.append(np.asarray(prompt, dtype=np.int32))
        responses.append((tokens, mask))
        counts.append((encoder.media.count_images(sizes) if sizes else 0, num_rows, num_tokens))
        row_index.append(position)
    if problems:
        raise DataError(first_lines(f"{len(problems)} rows cannot be used:", problems))
    if overlong and not (filter_overlong or truncation == "right"):
        raise DataError(
            first_lines(
                f"{len(overlong)} of {len(rows)} rows are longer than data.max_prompt_length + max_response_length = "
                f"{max_length} tokens. Set data.max_length={max(length for _, length in overlong)}, "
                "data.filter_overlong_prompts=True, or data.truncation=right.",
                [f"{rows.origin(position)}: {length} tokens" for position, length in overlong],
            )
        )
    if not prompts:
        raise DataError(f"{rows.paths}: all {len(rows)} rows are longer than {max_length} tokens (data.max_length).")
    of_images = np.ascontiguousarray(np.asarray(counts, dtype=np.int64).T)
    seeing: dict[str, Any] = {}
    if of_images.any():
        seeing = {"counts": of_images, "stored_images": rows.select(row_index).stored_images(), "encoder": encoder}
        seeing["placeholders"] = encoder.media.placeholders
    return PromptStore(
        np.concatenate(prompts), np.cumsum([0, *map(len, prompts)]), np.asarray(row_index), len(overlong), **seeing,
        responses=Responses.of(responses),
    )  # fmt: skip


def _tried(rows: Rows, encoder: ChatEncoder) -> Iterator[tuple[Any, int]]:
    """Yield each row with its number of images. The template has then rendered the row's chunk within its limits."""
    numbers = rows.num_images.tolist()
    if any(numbers):
        encoder.check_images_supported(videos=bool(rows.num_media[:, 1].any()))
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = [rows[position] for position in range(start, min(start + _CHUNK_ROWS, len(rows)))]
        of_chunk = numbers[start : start + _CHUNK_ROWS]
        media = rows.num_media[start : start + _CHUNK_ROWS].tolist()
        encoder.try_template([[*row.prompt, *row.extra_info[_TURNS]] for row in chunk], media)
        yield from zip(chunk, of_chunk, strict=True)


class _TurnWriter:
    """Writer of the tokens after a prompt, for one set of tools."""

    def __init__(self, encoder: ChatEncoder, tools: list[dict[str, Any]]) -> None:
        self._encoder, self._tools = encoder, tools
        self._turn_delta = TurnDelta(encoder, tools, (tools and detect_format(encoder, tools)) or NO_CALLS)
        self._added = encoder.tokenizer.added_tokens_decoder

    def response(self, prompt: list[Message], turns: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids [t] after the prompt, and a mask [t]: True for tokens of the assistant."""
        history, tokens, mask = list(prompt), list[int](), list[bool]()
        between: list[Message] = []
        for message in turns:
            if message["role"] != "assistant":
                between.append(message)
                continue
            if tokens:
                context = self._turn_delta.context(tokens[-1], _calls(history[-1]), between)
                tokens += context
                mask += [False] * len(context)
            elif between:
                raise DataError("the messages before the first assistant turn belong to the prompt.")
            history += between
            turn = self._turn(history, message)
            tokens += turn
            mask += [True] * len(turn)
            history.append(message)
            between = []
        return np.array(tokens, dtype=np.int32), np.array(mask, dtype=np.bool_)

    def _turn(self, history: list[Message], message: Message) -> list[int]:
        """Return the token ids that the policy would sample to say ``message``, with the token that ends a turn."""
        opened = self._encoder.render(history, tools=self._tools)
        whole = self._encoder.render([*history, message], answered=True, tools=self._tools)
        if not whole.startswith(opened):
            raise DataError(
                "the chat template writes an assistant turn differently than it opens one, so its tokens cannot be "
                "marked. Set actor_rollout_ref.model.custom_chat_template, or data.apply_chat_template_kwargs (such as "
                "enable_thinking) as in the rollouts."
            )
        text, tail = whole[len(opened) :], self._tail(opened)
        with_tail, before = self._ids(tail + text), self._ids(tail)
        ids = with_tail[len(before) :] if with_tail[: len(before)] == before else self._ids(text)
        ends = [place for place, token in enumerate(ids) if token in self._turn_delta.stop_token_ids]
        return ids[: ends[-1] + 1] if ends else [*ids, self._encoder.tokenizer.eos_token_id]

    def _tail(self, text: str) -> str:
        """Return the end of a text from its last added token on. Earlier text does not change the tokens of this part,
        because tokenizers split the text at added tokens.
        """
        return text[max((text.rfind(token.content) for token in self._added.values()), default=-1) :] if text else ""

    def _ids(self, text: str) -> list[int]:
        return list(self._encoder.tokenizer(text, add_special_tokens=False)["input_ids"])


def _calls(message: Message) -> list[Call]:
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [Call(str(each.get("name")), _arguments(each.get("arguments"))) for each in functions]


def _arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}
