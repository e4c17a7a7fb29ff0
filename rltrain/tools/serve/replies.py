"""Replies as OpenAI's servers write them, whole or piece by piece."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rltrain.base.http import Response
from rltrain.tools.serve.answers import Answer, Asked, Piece, TokenLogProb
from rltrain.tools.serve.requests import Wanted

_NO_NUMBER = -9999.0


class Replies:
    """The replies to one request. tokenizer: of transformers."""

    def __init__(self, model: str, *, chat: bool, asked: Sequence[Asked], wanted: Wanted, tokenizer: Any) -> None:
        self._chat, self._asked, self._wanted, self._tokenizer = chat, asked, wanted, tokenizer
        prefix, kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._kind, self._kind_of_piece = kind, f"{kind}.chunk" if chat else kind

    def whole(self, answers: Sequence[Answer]) -> Response:
        """The reply with all answers."""
        choices = []
        for answer in sorted(answers, key=lambda answer: answer.choice):
            choice: dict[str, Any] = {"index": answer.choice, "finish_reason": answer.finish}
            choice["logprobs"] = self._log_probs(answer.asked, answer.log_probs, first=True)
            if self._chat:
                choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
            else:
                choice["text"] = self._echoed(answer.asked) + answer.text
            choices.append(choice)
        return Response.of({**self._head, "object": self._kind, "choices": choices, "usage": self._usage(answers)})

    def first_pieces(self) -> list[bytes]:
        """What comes before any token."""
        choices = [
            (asked, asked.first_choice + place) for asked in self._asked for place in range(self._wanted.num_choices)
        ]
        if self._chat:
            return [self._event(number, delta={"role": "assistant", "content": ""}) for _, number in choices]
        return [
            self._event(number, text=self._echoed(asked), logprobs=self._log_probs(asked, [], first=True))
            for asked, number in choices
            if self._wanted.echo
        ]

    def piece(self, piece: Piece) -> bytes:
        """News of an answer."""
        answer = piece.answer
        log_probs = self._log_probs(answer.asked, piece.log_probs, first=False) if piece.log_probs else None
        content = {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
        return self._event(answer.choice, answer.finish if piece.ended else None, logprobs=log_probs, **content)

    def last_pieces(self, answers: Sequence[Answer]) -> list[bytes]:
        """What comes behind all tokens."""
        usage = {**self._head, "object": self._kind_of_piece, "choices": [], "usage": self._usage(answers)}
        return [*([_event(json.dumps(usage))] if self._wanted.include_usage else []), _event("[DONE]")]

    def _event(self, choice: int, finish: str | None = None, **content: Any) -> bytes:
        choices = [{"index": choice, "finish_reason": finish, **content}]
        return _event(json.dumps({**self._head, "object": self._kind_of_piece, "choices": choices}))

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        prompt = sum(len(asked.prompt.tokens) for asked in self._asked)
        drawn = sum(len(answer.tokens) for answer in answers)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    def _echoed(self, asked: Asked) -> str:
        if not self._wanted.echo:
            return ""
        if asked.text is not None:
            return asked.text
        tokens, skip = asked.prompt.tokens.tolist(), self._wanted.skip_special_tokens
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip))

    def _log_probs(self, asked: Asked, of_answer: Sequence[TokenLogProb], *, first: bool) -> dict[str, Any] | None:
        """first: those of the prompt come before, where it is echoed."""
        if self._wanted.num_top is None:
            return None
        told = [*(asked.prompt_log_probs if first else ()), *of_answer]
        if self._chat:
            return {"content": list(map(self._entry, told)), "refusal": None}
        texts = [self._tokenizer.decode([entry.token]) for entry in told]
        return {
            "tokens": texts,
            "token_logprobs": [None if entry.log_prob is None else _finite(entry.log_prob) for entry in told],
            "top_logprobs": [self._by_text(entry) for entry in told],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0))[: len(texts)],
        }

    def _by_text(self, entry: TokenLogProb) -> dict[str, float] | None:
        """The likeliest tokens and the one that stands there; of two with the same text the likelier."""
        if entry.log_prob is None:
            return None
        by_text: dict[str, float] = {}
        for token, log_prob in [*entry.top, (entry.token, entry.log_prob)]:
            by_text.setdefault(self._tokenizer.decode([token]), _finite(log_prob))
        return by_text

    def _entry(self, entry: TokenLogProb) -> dict[str, Any]:
        others = [self._named(token, log_prob) for token, log_prob in entry.top]
        return {**self._named(entry.token, entry.log_prob or 0.0), "top_logprobs": others}

    def _named(self, token: int, log_prob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        return {"token": text, "logprob": _finite(log_prob), "bytes": list(text.encode())}


def _finite(log_prob: float) -> float:
    """JSON has no infinity."""
    return max(log_prob, _NO_NUMBER)


def _event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()
