"""All executors of an engine. A trajectory stays in its first executor, which has its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from weakref import finalize

from rltrain.agents.chat import TrajectoryStart, Turn, TurnLimits
from rltrain.agents.executor import Executor, Trajectory, TrajectoryMessage
from rltrain.agents.toolbox import ToolSources
from rltrain.common.errors import ConfigError
from rltrain.runtime.slots.limits import Limits


class ExecutorPool:
    """``number`` processes that reply to the policy."""

    def __init__(self, sources: ToolSources, turn_limits: TurnLimits, limits: Limits, number: int) -> None:
        self._messages: SimpleQueue[TrajectoryMessage | str] = SimpleQueue()
        self._executors = [Executor(sources, turn_limits, limits, self._messages) for _ in range(number)]
        # The threads have no reference to the pool, so that they end when it is freed.
        finalize(self, _end, self._executors).atexit = False
        self._trajectories: dict[int, tuple[Trajectory, Executor]] = {}
        self._load: Counter[int] = Counter()
        # Numbers are never reused, so that late messages of closed trajectories are ignored.
        self._numbers = count()

    def start(self, start: TrajectoryStart, turn: Turn) -> int:
        """Start a trajectory with its first turn. Return its number in `poll`."""
        place = min(range(len(self._executors)), key=lambda at: self._load[at])
        self._load[place] += 1
        trajectory = Trajectory(next(self._numbers), start)
        self._trajectories[trajectory.number] = trajectory, self._executors[place]
        self.send_turn(trajectory.number, turn)
        return trajectory.number

    def send_turn(self, number: int, turn: Turn | None) -> None:
        """Send another turn; None: there is none."""
        trajectory, executor = self._trajectories[number]
        trajectory.turns.append(turn)
        executor.send_turn(trajectory)

    def close(self, number: int) -> None:
        """Cancel the trajectory."""
        if number in self._trajectories:
            trajectory, executor = self._trajectories[number]
            self._remove(number)
            executor.close(trajectory)

    def close_all(self) -> None:
        """Cancel all trajectories."""
        for number in list(self._trajectories):
            self.close(number)

    def _remove(self, number: int) -> None:
        _, executor = self._trajectories.pop(number)
        self._load[self._executors.index(executor)] -= 1

    def poll(self, wait_s: float = 0.0) -> list[TrajectoryMessage]:
        """Return the trajectories' new messages; wait at most ``wait_s`` for the first.

        Raises ConfigError if no trajectory can be run, because the user's code cannot be imported.
        """
        received: list[TrajectoryMessage] = []
        with suppress(Empty):
            message = self._messages.get(timeout=wait_s) if wait_s else self._messages.get_nowait()
            while True:
                if isinstance(message, str):
                    raise ConfigError(message)
                if message.number in self._trajectories:
                    if "request" in message.line:
                        trajectory, _ = self._trajectories[message.number]
                        trajectory.messages.append(message.line["request"])
                        trajectory.rewards.append(message.line["rewards"])
                    else:
                        self._remove(message.number)
                    received.append(message)
                message = self._messages.get_nowait()
        return received

    def take_printed(self) -> str:
        """Return and clear the output that tools and agents have printed."""
        return "".join(executor.take_printed() for executor in self._executors)

    def shutdown(self) -> None:
        """End all processes, and wait for their end."""
        _end(self._executors)
        for executor in self._executors:
            executor.join()


def _end(executors: Sequence[Executor]) -> None:
    for executor in executors:
        executor.end()
