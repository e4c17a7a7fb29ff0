"""Trajectory data for scorers, files and turn estimators, in addition to the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.agents.chat import Message
from rltrain.common.columns import names as c
from rltrain.common.columns.answer import AnswerText
from rltrain.workers.rollout.conversations import Conversation

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


def texts_with_trajectories(answers: Sequence[Conversation], decode: Decode) -> list[str]:
    """Return the responses as `AnswerText` with their trajectory data. decode: function that decodes a batch of token
    ids.
    """
    texts = decode([answer.tokens.tolist() for answer in answers])
    parts = [_turns(answer) for answer in answers]
    turns = iter(decode([turn for of_answer in parts for turn in of_answer]))
    texts_with_info: list[str] = []
    for text, answer, of_answer in zip(texts, answers, parts, strict=True):
        turn_texts = [next(turns) for _ in of_answer]
        texts_with_info.append(AnswerText.of(text, **_trajectory_info(answer, turn_texts)))
    return texts_with_info


def per_turn(answers: Sequence[Conversation]) -> dict[str, NDArray[np.object_]]:
    """Return `columns.PER_TURN`, an array per conversation. A response without policy tokens has one empty turn."""
    numbers = {name: np.empty(len(answers), dtype=object) for name in c.PER_TURN}
    for place, answer in enumerate(answers):
        edges = _edges(answer) or [0, 0]
        turns = list(pairwise(edges))[::2]
        # The context of the first turn is empty: the turn follows the prompt, which all samples of a group share.
        contexts = [b"", *(_shown(answer, start, end) for start, end in list(pairwise(edges))[1::2])]
        numbers[c.TURN_TOKENS][place] = np.array([end - start for start, end in turns])
        numbers[c.TURN_STATES][place] = np.array([_hash(context) for context in contexts])
        paid = [answer.turn_rewards.get(turn, 0.0) for turn in range(1, len(turns) + 1)]
        numbers[c.TURN_REWARDS][place] = np.array(paid)
    return numbers


def _shown(answer: Conversation, start: int, end: int) -> bytes:
    """Return the bytes of a context's tokens and pixels. Images of equal size have equal tokens, so the pixels are
    needed."""
    tokens, images = answer.tokens[start:end].tobytes(), answer.images
    if images is None:
        return tokens
    numbers = np.arange(len(images.num_tokens))
    here = numbers.repeat(images.num_tokens)[(images.places >= start) & (images.places < end)]
    return tokens + images.pixel_values[np.isin(numbers.repeat(images.num_rows), here)].tobytes()


def _hash(context: bytes) -> int:
    return int.from_bytes(blake2b(context, digest_size=8).digest(), "little", signed=True) if context else 0


def _edges(answer: Conversation) -> list[int]:
    """Return alternating start and end offsets of the policy's turns."""
    return np.flatnonzero(np.diff(answer.mask.astype(np.int8), prepend=0, append=0)).tolist()


def _turns(answer: Conversation) -> list[list[int]]:
    """Return the token ids of the policy's turns."""
    return [answer.tokens[start:end].tolist() for start, end in list(pairwise(_edges(answer)))[::2]]


def _trajectory_info(answer: Conversation, turns: Sequence[str]) -> dict[str, Any]:
    messages: list[Message] = []
    for place, turn in enumerate(turns):
        messages.append({"role": "assistant", "content": turn})
        messages += answer.messages_after[place] if place < len(answer.messages_after) else []
    info: dict[str, Any] = {
        **{name: value for name, value in answer.extra.items() if not name.startswith("agent_")},
        # As in verl: the policy's turns, the replies to them, and the prompt.
        "num_turns": 2 * answer.num_turns,
        "tool_rewards": answer.rewards,
        "messages": messages,
        "last_turn": turns[-1] if turns else "",
    }
    if answer.numbers:
        numbers = dict(answer.numbers)
        info |= {"agent_score": numbers.pop("score")} if "score" in numbers else {}
        info |= {"agent_numbers": numbers} if numbers else {}
    return info | ({"agent_failed": answer.failed} if answer.failed else {})
