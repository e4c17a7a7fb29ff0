"""FrozenLake: cross a lake of ice without falling into a hole. Each observation is the map with the player's position.

Rows come from ``python -m rltrain.data_preprocess.frozen_lake``, with their maps in ``extra_info.make.desc``.
"""

from typing import Any

from rltrain.agents.ready.gymnasium import TextEnv

ACTIONS = ("left", "down", "right", "up")
_PLAYER = "P"


class FrozenLake(TextEnv):
    """The environment of gymnasium, which is deterministic unless ``slippery``; 1 for the goal, else 0.

    Args:
        slippery: True if a step may slip to one of the sides.
        max_steps: Steps after which it is over.

    Raises ConfigError without gymnasium.
    """

    def __init__(self, slippery: bool = False, max_steps: int | None = None) -> None:
        make = {"is_slippery": slippery}
        super().__init__("FrozenLake-v1", ACTIONS, make=make, make_from_row=("desc",), max_steps=max_steps)
        self._render = _seen


def _seen(env: Any, observation: Any) -> str:
    """Return the map with the player, and a sentence about the end."""
    rows = [[cell.decode() for cell in row] for row in env.unwrapped.desc]
    row, column = divmod(int(observation), len(rows[0]))
    under = rows[row][column]
    rows[row][column] = _PLAYER
    ends = {"H": "\nYou fell into a hole.", "G": "\nYou reached the goal."}
    return "\n".join("".join(cells) for cells in rows) + ends.get(under, "")
