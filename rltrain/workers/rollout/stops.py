"""Texts that end a turn (`rollout.stop`), found in the tokens as they come, whatever tokens a text is made of.

Engines look for them on detokenised text and cut that, while a trainer needs to know with which token a turn has ended.
So the last tokens are read again with every new one: as many as a stop text can be made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

# Tokens that are read besides, as some have no text of their own.
_MORE = 4
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # for a part of a character's bytes


class StopTexts:
    """decode(tokens): their text, special tokens included."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops, self._decode = stops, decode
        # A token has a byte at least.
        self._window = max((len(stop.encode()) for stop in stops), default=0) + _MORE

    def __bool__(self) -> bool:
        return bool(self._stops)

    def end_of(self, earlier: Sequence[int] | NDArray[np.int32], tokens: Sequence[int], known: int) -> int | None:
        """With how many of its tokens a turn has ended; None where it goes on.

        earlier: tokens of the same turn, in which a stop text may begin but not end. known: so many tokens have not
        ended it.
        """
        for count in range(known + 1, len(tokens) + 1) if self._stops else ():
            own = tokens[max(0, count - self._window) : count]
            before = list(map(int, earlier[len(earlier) - min(len(earlier), self._window - len(own)) :]))
            begins = len(self._decode(before).rstrip(_BROKEN)) if before else 0
            text = self._decode([*before, *own])
            if any(text.find(stop, max(0, begins - len(stop) + 1)) >= 0 for stop in self._stops):
                return count
        return None
