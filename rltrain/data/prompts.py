"""Prompts of a run: all tokens in memory, pixels on demand.

Prompts are encoded once, before a run starts, into a `PromptStore`: flat arrays that every process reads from shared
memory without a tokenizer. Pixels are hundreds of times larger. Therefore a store contains only the locations of
images, and the process that needs a prompt reads and processes its images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.errors import DataError
from rltrain.data.chat import ChatEncoder
from rltrain.data.images import EncodedPrompt, collapse_placeholders, has_slot, with_parts
from rltrain.data.rows import PromptRow, Rows, first_lines
from rltrain.data.stored_images import StoredImages

# Rows per chunk: enough for parallel tokenization, without all texts in memory at once.
_ENCODE_CHUNK_ROWS = 512
# Time limit for finding further bad prompts, because a hanging template uses up its time limit for each.
_SEARCH_S = 5.0


@dataclass(frozen=True)
class Responses:
    """Token ids of a response per prompt, concatenated, with a mask of the tokens to learn."""

    values: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Responses:
        """Join the tokens [t] and masks [t] of all rows."""
        tokens, masks = zip(*rows, strict=True)
        return cls(np.concatenate(tokens), np.concatenate(masks), np.cumsum([0, *map(len, tokens)]))

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(self.offsets[i], self.offsets[i + 1])
        return self.values[part], self.mask[part]


@dataclass(frozen=True)
class PromptStore:
    """Token ids of prompts, concatenated. Text prompts are readable without torch or a tokenizer.

    Prompt ``i`` is ``values[offsets[i]:offsets[i + 1]]`` (int32) and belongs to row ``row_index[i]`` of its source
    rows; ``num_dropped`` rows were too long. ``counts`` [3, prompts]: image counts (see the properties).
    ``stored_images`` and ``encoder``: sources of the pixels.
    """

    values: np.ndarray
    offsets: np.ndarray
    row_index: np.ndarray
    num_dropped: int
    counts: np.ndarray | None = None
    stored_images: StoredImages | None = None
    encoder: ChatEncoder | None = None
    placeholders: tuple[int, ...] = ()
    """Token ids of image and video placeholders. Empty, as the three fields above are None, if no prompt has images."""
    responses: Responses | None = None
    """Responses from the data, for supervised fine-tuning."""

    def __len__(self) -> int:
        return len(self.row_index)

    def __repr__(self) -> str:
        return f"<PromptStore: {len(self)} prompts, {len(self.values)} tokens, {self.num_dropped} dropped>"

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per prompt, int64."""
        return np.diff(self.offsets)

    @property
    def has_images(self) -> bool:
        """True if any prompt has images."""
        return self.counts is not None

    @property
    def has_videos(self) -> bool:
        """True if any prompt has videos."""
        return len(self.placeholders) > 1 and bool(np.isin(self.values, self.placeholders[1:]).any())

    @property
    def num_images(self) -> np.ndarray:
        """Images per prompt, int64. Each step in time of a video (two frames) counts as one."""
        return self._counts(0)

    @property
    def image_rows(self) -> np.ndarray:
        """Rows of pixels (patches or tiles) per prompt, int64: the vision tower's workload."""
        return self._counts(1)

    @property
    def image_tokens(self) -> np.ndarray:
        """Image tokens per prompt, int64."""
        return self._counts(2)

    def _counts(self, row: int) -> np.ndarray:
        return np.zeros(len(self), dtype=np.int64) if self.counts is None else self.counts[row]

    def encoded(self, i: int) -> EncodedPrompt:
        """Return prompt ``i`` with its pixels, which are read and processed in this process.

        Raises DataError, naming file and row, if an image is no longer readable or has changed.
        """
        tokens = self.prompt(i)
        if self.counts is None or not self.counts[0, i]:
            return EncodedPrompt(tokens)
        assert self.stored_images is not None
        assert self.encoder is not None
        try:
            return self.encoder.with_pixels(tokens, self.encoder.open_images(self.stored_images.of(i)))
        except DataError as error:
            raise DataError(f"{self.stored_images.origin(i)}: {error}") from error

    def prompt(self, i: int) -> np.ndarray:
        """Return the token ids of prompt ``i`` (int32, a view)."""
        if not 0 <= i < len(self):
            raise IndexError(f"prompt {i} of {len(self)}")
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def short(self, i: int) -> np.ndarray:
        """Return prompt ``i`` with one placeholder per image: for logs, and for engines that expand it."""
        tokens = self.prompt(i)
        return collapse_placeholders(tokens, self.placeholders) if self.placeholders else tokens


def encode_prompts(
    rows: Rows,
    encoder: ChatEncoder,
    max_prompt_length: int,
    filter_overlong: bool = False,
    truncation: str = "error",
    clock: Clock = SYSTEM,
) -> PromptStore:
    """Encode all rows with at most ``max_prompt_length`` tokens.

    A longer prompt is dropped (``filter_overlong``) or else handled by ``truncation``: ``error`` raises, ``left`` keeps
    its last tokens, ``right`` its first, ``middle`` half of each. Then use ``rows.select(store.row_index)``, so that
    prompt i of the store belongs to row i.
    """
    token_ids, row_index, overlong, counts, problems = [], [], [], [], []
    _ = encoder.tokenizer  # a missing tokenizer is not an error of a row
    for position, outcome in enumerate(_encode_rows(rows, encoder, clock)):
        if isinstance(outcome, str):
            problems.append(f"{rows.origin(position)}: {outcome}")
            continue
        ids, count = outcome
        if len(ids) > max_prompt_length:
            # Long prompts are collected even if they are an error. The message can then give their number and a length
            # that is sufficient for all.
            if filter_overlong or truncation == "error" or count[0]:
                overlong.append((position, len(ids)))
                continue
            ids = truncate(ids, max_prompt_length, truncation)
        row_index.append(position)
        counts.append(count)
        # int32 is enough for every vocabulary and halves the shared memory.
        token_ids.append(np.asarray(ids, dtype=np.int32))
    title = f"{len(problems)} or more prompts cannot be used:"
    reports = [problems[0] if len(problems) == 1 else first_lines(title, problems)] if problems else []
    if overlong and not filter_overlong:
        reports.append(_overlong_report(rows, overlong, max_prompt_length))
    if reports:
        raise DataError("\n".join(reports))
    if not token_ids:
        shortest = min(length for _, length in overlong)
        raise DataError(
            f"data.filter_overlong_prompts=True drops every prompt: all {len(rows)} are longer than "
            f"data.max_prompt_length={max_prompt_length} tokens (the shortest has {shortest})."
        )
    store = PromptStore(
        values=np.concatenate(token_ids),
        offsets=np.cumsum([0, *map(len, token_ids)], dtype=np.int64),
        row_index=np.asarray(row_index, dtype=np.int64),
        num_dropped=len(overlong),
    )
    of_images = np.ascontiguousarray(np.asarray(counts, dtype=np.int64).T)
    if not of_images.any():
        return store
    stored_images, placeholders = rows.select(row_index).stored_images(), encoder.media.placeholders
    store = replace(store, counts=of_images, stored_images=stored_images, encoder=encoder, placeholders=placeholders)
    store.encoded(int(np.argmax(of_images[0] > 0)))  # verifies the processor's output against its counts
    return store


def check_limit_images(rows: Rows, store: PromptStore, most: int | None) -> None:
    """Raise DataError for a prompt with more images than ``most`` (``rollout.limit_images``). rows: rows of the
    store."""
    over = [] if most is None else np.flatnonzero(store.num_images > most).tolist()
    if over:
        title = (
            f"{len(over)} of {len(rows)} prompts have more images than actor_rollout_ref.rollout.limit_images={most}."
        )
        raise DataError(first_lines(title, [f"{rows.origin(i)}: {store.num_images[i]} images" for i in over]))


def check_vocabulary(rows: Rows, store: PromptStore, encoder: ChatEncoder) -> None:
    """Raise DataError for a prompt with a token outside of the model's vocabulary. rows: rows of the store."""
    size = encoder.model_vocab_size
    over = np.flatnonzero(store.values >= size) if size is not None else ()
    if len(over):
        prompts = np.unique(np.searchsorted(store.offsets, over, side="right") - 1).tolist()
        title = (
            f"{len(prompts)} of {len(rows)} prompts have tokens that the model in {encoder.path!r} lacks: its "
            f"vocabulary has {size:,}, its tokenizer {encoder.vocab_size:,}. Use the tokenizer that belongs to it."
        )
        raise DataError(first_lines(title, [f"{rows.origin(i)}: token {store.prompt(i).max()}" for i in prompts]))


def truncate(ids: list[int], limit: int, how: str) -> list[int]:
    """Return at most ``limit`` of ``ids``: the last (``left``), the first (``right``) or half of each (``middle``)."""
    if len(ids) <= limit:
        return ids
    if how == "left":
        return ids[len(ids) - limit :]
    if how == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


Encoded = tuple[list[int], tuple[int, int, int]]


def _encode_rows(rows: Rows, encoder: ChatEncoder, clock: Clock) -> Iterator[Encoded | str]:
    """Yield token ids and image counts per row, or the problem of a row.

    Rows are encoded in chunks, and one by one if a chunk fails. Stops early if the search for bad rows takes too long.
    """
    for number, kind in enumerate(("an image", "a video")):
        having = np.flatnonzero(rows.num_media[:, number])
        if len(having):
            try:
                encoder.check_images_supported(videos=kind == "a video")
            except DataError as error:
                raise DataError(f"{rows.origin(int(having[0]))} holds {kind}: {error}") from error
    stream: Iterator[PromptRow] = iter(rows)
    deadline = 0.0
    for start in range(0, len(rows), _ENCODE_CHUNK_ROWS):
        chunk = list(islice(stream, _ENCODE_CHUNK_ROWS))
        try:
            yield from _encode_chunk(rows, encoder, start, chunk)
        except DataError:
            deadline = deadline or clock.monotonic() + _SEARCH_S
            num_wrong = 0
            for outcome in _one_by_one(rows, encoder, start, chunk):
                num_wrong += isinstance(outcome, str)
                yield outcome
                if num_wrong and clock.monotonic() > deadline:
                    return
            if not num_wrong:
                raise


def _encode_chunk(rows: Rows, encoder: ChatEncoder, first: int, chunk: Sequence[PromptRow]) -> list[Encoded]:
    """Return token ids and image counts of the rows from ``first`` on. Raises DataError."""
    if problem := next(filter(None, map(encoder.row_tools.problem, chunk)), None):
        raise DataError(problem)
    prompts = [row.prompt for row in chunk]
    encoder.try_template(prompts, rows.num_media[first : first + len(chunk)].tolist())
    encoded: dict[int, Encoded] = {}
    for tools, numbers in encoder.row_tools.groups(chunk):
        group = [prompts[number] for number in numbers]
        if not rows.num_images.any():
            # A slot without an image is an error, because otherwise a vision model would be trained on the literal
            # text.
            for messages in filter(has_slot, group):
                if encoder.has_tower:
                    with_parts(messages, 0)
            encoded |= {
                number: (ids, (0, 0, 0))
                for number, ids in zip(numbers, encoder.encode_batch(group, tools=tools), strict=True)
            }
            continue
        sizes = [[encoder.bounded_size(size) for size in rows.image_sizes(first + number)] for number in numbers]
        for number, of, expansion in zip(numbers, sizes, encoder.expand(group, sizes, tools), strict=True):
            ids, num_rows, num_tokens = expansion
            encoded[number] = (ids, (encoder.media.count_images(of), num_rows, num_tokens))
    return [encoded[number] for number in range(len(chunk))]


def _one_by_one(rows: Rows, encoder: ChatEncoder, start: int, chunk: Sequence[PromptRow]) -> Iterator[Encoded | str]:
    """Yield the encoding or the problem of each row from ``start`` on."""
    for position, row in enumerate(chunk, start):
        try:
            yield from _encode_chunk(rows, encoder, position, [row])
        except DataError as error:
            yield str(error)


def _overlong_report(rows: Rows, overlong: list[tuple[int, int]], limit: int) -> str:
    # A prompt with images is never truncated: no model could read part of an image.
    has_images = rows.num_images[[position for position, _ in overlong]].any()
    has_videos = rows.num_media[[position for position, _ in overlong], 1].any()
    smaller = "data.video_max_frames or data.video_max_pixels" if has_videos else "data.max_pixels"
    instead = f"a smaller {smaller} (a prompt with images is not cut)" if has_images else "data.truncation=left"
    longest = max(length for _, length in overlong)
    title = (
        f"{len(overlong)} of {len(rows)} prompts are longer than data.max_prompt_length={limit} tokens. Try "
        f"data.filter_overlong_prompts=True, data.max_prompt_length={longest}, or {instead}."
    )
    return first_lines(title, [f"{rows.origin(position)}: {length} tokens" for position, length in overlong])
