"""Texts that end a turn (`rollout.stop`), matched in generated tokens, independent of their tokenisation.

Engines match and truncate detokenised text, but a trainer needs the token that ended the turn. So after every new token
the last tokens are decoded again, as many as a stop text can have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

# Extra tokens to decode, because some tokens have no text.
_MORE = 4
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # for incomplete UTF-8


class StopTexts:
    """Matcher of stop texts. decode(tokens): their text, including special tokens."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops, self._decode = stops, decode
        # A token has at least one byte, so a stop text spans at most as many tokens as it has bytes.
        self._window = max((len(stop.encode()) for stop in stops), default=0) + _MORE

    def __bool__(self) -> bool:
        return bool(self._stops)

    def end_of(self, earlier: Sequence[int] | NDArray[np.int32], tokens: Sequence[int], known: int) -> int | None:
        """Return the number of tokens after which the turn ends; None if it continues.

        earlier: tokens of the same turn, in which a stop text may begin but not end. known: tokens already checked.
        """
        for count in range(known + 1, len(tokens) + 1) if self._stops else ():
            own = tokens[max(0, count - self._window) : count]
            before = list(map(int, earlier[len(earlier) - min(len(earlier), self._window - len(own)) :]))
            begins = len(self._decode(before).rstrip(_BROKEN)) if before else 0
            text = self._decode([*before, *own])
            if any(text.find(stop, max(0, begins - len(stop) + 1)) >= 0 for stop in self._stops):
                return count
        return None
