"""Who answers the policy between two turns: tools, in the words of the chat template.

Problem: what a turn says has to be read, acted on and answered in tokens, and all processes of a replica must go on
alike. Choice: every process reads the turn, so all know whether it goes on; the leader alone asks the tools, and the
others get the tokens that it makes of their results. Left out: what is done with the tokens (`Conversations`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rltrain.base.columns import names as c
from rltrain.config.schema.rollout import MultiTurnConfig
from rltrain.data.chat import ChatEncoder
from rltrain.data.turns.calls import Call, CallFormat, Parsed
from rltrain.data.turns.seam import Seam
from rltrain.workers.rollout.queue import Replica
from rltrain.workers.rollout.tools import Key, Result, Tools

# With several processes, how many times the engine asks before they agree on what has arrived: that costs a broadcast.
_ASKS_PER_LOOK = 4


@dataclass(frozen=True)
class Context:
    """What stands between two turns."""

    tokens: NDArray[np.int32]
    counts: Counter[str] = field(default_factory=Counter)
    """`columns.OF_TURNS`, and ``tool_ms``: of the slowest call."""
    rewards: list[float] = field(default_factory=list)
    """What the tools say of the calls that were run."""


class Answering:
    """The tools of a run for one engine. tools: at the process that leads its replica."""

    def __init__(
        self,
        cfg: MultiTurnConfig,
        encoder: ChatEncoder,
        call_format: CallFormat,
        replica: Replica,
        tools: Tools | None,
        max_model_len: int,
    ) -> None:
        self.max_model_len = max_model_len
        self._cfg, self._encoder, self._format = cfg, encoder, call_format
        self._replica, self._tools = replica, tools
        self._names = {schema["function"]["name"] for schema in encoder.tools}
        self._seam = Seam(encoder, encoder.tools, call_format)
        self.stop_token_ids = self._seam.stop_token_ids
        """Every token that ends a turn."""
        self._asked: dict[Key, tuple[int, Parsed]] = {}
        self._num_looks = 0

    def read(self, tokens: Sequence[int]) -> Parsed:
        """What a turn says."""
        (text,) = self._encoder.decode_batch([tokens], special=True)
        return self._format.parse(text, self._encoder.tools)

    def is_last(self, num_turns: int) -> bool:
        """Whether no turn follows the turn of this number."""
        return self._cfg.max_assistant_turns is not None and num_turns >= self._cfg.max_assistant_turns

    def ask(self, key: Key, end_token: int, said: Parsed) -> None:
        """Begin the calls of a turn."""
        self._asked[key] = end_token, said
        if self._tools:
            self._tools.ask(
                key, [call for call in said.calls[: self._cfg.max_parallel_calls] if call.name in self._names]
            )

    def forget(self) -> None:
        """No conversation waits any more."""
        self._asked = {}
        if self._tools:
            self._tools.forget()

    def arrived(self, wait_s: float = 0.0) -> list[tuple[Key, Context]]:
        """The turns that tools have answered by now. All processes of a replica get the same."""
        self._num_looks += 1
        if not self._asked or (self._replica.size > 1 and not wait_s and self._num_looks % _ASKS_PER_LOOK):
            return []
        answered = self._tools.answered(wait_s) if self._tools else ()
        answers: list[tuple[Key, Context]] = self._replica.agree(
            [(key, self._context(key, of)) for key, of in answered]
        )
        for key, _ in answers:
            del self._asked[key]
        return answers

    def _context(self, key: Key, results: Sequence[Result]) -> Context:
        end_token, said = self._asked[key]
        counts: Counter[str] = Counter({c.TOOL_CALLS: len(said.calls), c.UNREADABLE_CALLS: len(said.problems)})
        remaining, messages = iter(results), []
        for place, call in enumerate(said.calls):
            if place >= self._cfg.max_parallel_calls:
                text = f"Error: not run: at most {self._cfg.max_parallel_calls} calls in a turn"
                counts[c.CALLS_NOT_RUN] += 1
            elif call.name not in self._names:
                text = f"Error: there is no tool {call.name!r}; there are {', '.join(sorted(self._names))}"
                counts[c.TOOL_ERRORS] += 1
            else:
                result = next(remaining)
                text = self._shortened(result.text)
                counts[c.TOOL_ERRORS] += result.status != "ok"
                counts[c.TOOL_TIMEOUTS] += result.status == "timeout"
                counts["tool_ms"] = max(counts["tool_ms"], round(1e3 * result.seconds))
            messages.append({"role": "tool", "name": call.name, "content": text})
        # In the place of a call that could not be read stands one of the template's own kind, as results need one.
        calls = [*said.calls, *(Call("unreadable", {}) for _ in said.problems)]
        messages += [{"role": "tool", "name": "unreadable", "content": f"Error: {why}"} for why in said.problems]
        tokens = np.array(self._seam.context(end_token, calls, messages), dtype=np.int32)
        return Context(tokens, counts, [result.reward for result in results])

    def _shortened(self, text: str) -> str:
        most, side = self._cfg.max_tool_response_length, self._cfg.tool_response_truncate_side
        if len(text) <= most:
            return text
        if side == "left":
            return f"(truncated)...{text[-most:]}"
        if side == "right":
            return f"{text[:most]}...(truncated)"
        half = most // 2
        return f"{text[:half]}...(truncated)...{text[len(text) - (most - half) :]}"
