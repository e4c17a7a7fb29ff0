"""What scorers and files hear of trajectories besides their text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rltrain.agents.chat import Message
from rltrain.base.columns.answer import AnswerText
from rltrain.workers.rollout.conversations import Conversation

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


def told_texts(answers: Sequence[Conversation], decode: Decode) -> list[str]:
    """The answers as texts, which bring what an `AnswerText` says of a trajectory. decode: token ids of several."""
    texts = decode([answer.tokens.tolist() for answer in answers])
    parts = [_turns(answer) for answer in answers]
    turns = iter(decode([turn for of_answer in parts for turn in of_answer]))
    told: list[str] = []
    for text, answer, of_answer in zip(texts, answers, parts, strict=True):
        said = [next(turns) for _ in of_answer]
        told.append(AnswerText.of(text, **_told(answer, said)))
    return told


def _turns(answer: Conversation) -> list[list[int]]:
    """Token ids of the turns of the policy."""
    edges = np.flatnonzero(np.diff(answer.mask.astype(np.int8), prepend=0, append=0)).tolist()
    return [answer.tokens[start:end].tolist() for start, end in list(pairwise(edges))[::2]]


def _told(answer: Conversation, turns: Sequence[str]) -> dict[str, Any]:
    messages: list[Message] = []
    for place, turn in enumerate(turns):
        messages.append({"role": "assistant", "content": turn})
        messages += answer.said[place] if place < len(answer.said) else []
    told: dict[str, Any] = {
        **{name: value for name, value in answer.extra.items() if not name.startswith("agent_")},
        # As verl counts: turns of the policy, what answers them, and the prompt.
        "num_turns": 2 * answer.num_turns,
        "tool_rewards": answer.rewards,
        "messages": messages,
        "last_turn": turns[-1] if turns else "",
    }
    if answer.numbers:
        numbers = dict(answer.numbers)
        told |= {"agent_score": numbers.pop("score")} if "score" in numbers else {}
        told |= {"agent_numbers": numbers} if numbers else {}
    return told | ({"agent_failed": answer.failed} if answer.failed else {})
