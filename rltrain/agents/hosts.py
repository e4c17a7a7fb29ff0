"""All hosts of an engine. A trajectory stays in the host where it began, which has its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from weakref import finalize

from rltrain.agents.chat import Start, Terms, Turn
from rltrain.agents.host import Held, Host, News
from rltrain.agents.toolbox import Places
from rltrain.common.errors import ConfigError
from rltrain.runtime.slots.limits import Limits


class Hosts:
    """``number`` processes that reply to the policy."""

    def __init__(self, places: Places, terms: Terms, limits: Limits, number: int) -> None:
        self._news: SimpleQueue[News | str] = SimpleQueue()
        self._hosts = [Host(places, terms, limits, self._news) for _ in range(number)]
        # The threads hold no reference to this object, so they can end with it.
        finalize(self, _end, self._hosts).atexit = False
        self._held: dict[int, tuple[Held, Host]] = {}
        self._load: Counter[int] = Counter()
        # Never reused, so that late messages of a closed trajectory are ignored.
        self._numbers = count()

    def begin(self, start: Start, turn: Turn) -> int:
        """Start a trajectory with its first turn. Return its number in `news`."""
        place = min(range(len(self._hosts)), key=lambda at: self._load[at])
        self._load[place] += 1
        held = Held(next(self._numbers), start)
        self._held[held.number] = held, self._hosts[place]
        self.go_on(held.number, turn)
        return held.number

    def go_on(self, number: int, turn: Turn | None) -> None:
        """Send another turn; None: there is no other."""
        held, host = self._held[number]
        held.turns.append(turn)
        host.ask(held)

    def close(self, number: int) -> None:
        """Cancel the trajectory."""
        if number in self._held:
            held, host = self._held[number]
            self._forget(number)
            host.close(held)

    def close_all(self) -> None:
        """Cancel all trajectories."""
        for number in list(self._held):
            self.close(number)

    def _forget(self, number: int) -> None:
        _, host = self._held.pop(number)
        self._load[self._hosts.index(host)] -= 1

    def news(self, wait_s: float = 0.0) -> list[News]:
        """Return the trajectories' new messages; wait at most ``wait_s`` for the first.

        Raises ConfigError if no trajectory can be run, because the user's code cannot be imported.
        """
        found: list[News] = []
        with suppress(Empty):
            item = self._news.get(timeout=wait_s) if wait_s else self._news.get_nowait()
            while True:
                if isinstance(item, str):
                    raise ConfigError(item)
                if item.number in self._held:
                    if "ask" in item.line:
                        held, _ = self._held[item.number]
                        held.said.append(item.line["ask"])
                        held.paid.append(item.line["rewards"])
                    else:
                        self._forget(item.number)
                    found.append(item)
                item = self._news.get_nowait()
        return found

    def printed(self) -> str:
        """Return and clear the output that tools and agents have printed."""
        return "".join(host.printed() for host in self._hosts)

    def shut(self) -> None:
        """End all processes, and wait for their end."""
        _end(self._hosts)
        for host in self._hosts:
            host.join()


def _end(hosts: Sequence[Host]) -> None:
    for host in hosts:
        host.end()
