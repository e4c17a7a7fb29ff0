"""Frozen lakes: checks that the moves in a response lead from the start to the goal, around the holes."""

import re
from typing import Any

from rltrain.rewards.scorers.registry import scorer

_MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_MOVE = re.compile(r"\b(?:left|down|right|up)\b", re.IGNORECASE)
_MAX_MOVES = 1000


@scorer("rltrain/frozen_lake")
def frozen_lake(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 1 if the goal is reached, else 0. The environment scores responses of several turns (`agents.ready`)."""
    lake = list(extra_info["make"]["desc"])
    row, column = 0, 0
    for place, match in enumerate(_MOVE.finditer(solution_str)):
        down, right = _MOVES[match[0].lower()]
        # A step against the edge does not move, as in the environment.
        row, column = min(max(row + down, 0), len(lake) - 1), min(max(column + right, 0), len(lake[0]) - 1)
        if lake[row][column] in "HG" or place >= _MAX_MOVES:
            break
    return float(lake[row][column] == "G")
