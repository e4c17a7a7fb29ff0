"""Generate frozen-lake maps for rltrain.agents.ready.frozen_lake:FrozenLake, with gymnasium's generator.

Every map has a path to the goal, and no test map is in train. The prompt shows the first observation, and the ground
truth is the moves of a shortest path.
"""

import argparse
import random
import sys
from collections.abc import Sequence

from rltrain.agents.ready.frozen_lake import ACTIONS, FrozenLake
from rltrain.common.errors import DataError
from rltrain.data_preprocess.common import Row, Splits, arguments, at_least, row, run

DATA_SOURCE = "rltrain/frozen_lake"
INSTRUCTION = (
    "You are P on a frozen lake: F is ice, H is a hole, G is the goal, S is the start. Reach the goal without falling "
    "into a hole. Each turn, say one move: left, down, right or up."
)
_MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
# Number of consecutive duplicate maps after which the search for new ones stops.
_PATIENCE = 200
# With less ice, or on a larger map, hardly any map has a path, and the generator retries until one has.
_LEAST_ICE, _MAX_SIZE = 0.6, 16

Map = tuple[str, ...]


def generate(
    num_train: int, num_test: int, *, seed: int, sizes: Sequence[int], ice: float, instruction: str = INSTRUCTION
) -> Splits:
    """Return the rows of both splits. Train maps repeat if too few exist.

    Raises DataError if there are too few maps for ``num_test``, and ConfigError without gymnasium.
    """
    if not _LEAST_ICE <= ice <= 1 or max(sizes) > _MAX_SIZE:
        raise DataError(f"--ice must be {_LEAST_ICE} to 1 (got {ice}), and --sizes 2 to {_MAX_SIZE}.")
    lake = FrozenLake()
    maps = _maps(num_train + num_test, random.Random(seed), sizes, ice)
    test, train = maps[:num_test], maps[num_test:]
    if len(test) < num_test or (num_train and not train):
        raise DataError(
            f"--sizes {' '.join(map(str, sizes))} --ice {ice} has too few maps for {num_test} held-out ones. "
            "Try a larger size or a smaller --num-test."
        )
    repeated = [train[index % len(train)] for index in range(num_train)]
    return {
        split: [_row(lake, instruction, split, index, each) for index, each in enumerate(chosen)]
        for split, chosen in (("train", repeated), ("test", test))
    }


def _maps(count: int, chance: random.Random, sizes: Sequence[int], ice: float) -> list[Map]:
    """Return ``count`` different maps, or all that were found."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    maps: dict[Map, None] = {}
    missed = 0
    while len(maps) < count and missed < _PATIENCE:
        lake = tuple(generate_random_map(chance.choice(sizes), ice, chance.getrandbits(31)))
        missed = missed + 1 if lake in maps else 0
        maps.setdefault(lake)
    return list(maps)


def shortest_way(lake: Map) -> list[str]:
    """Return the moves of a shortest path around the holes from start to goal. Every generated lake has one."""
    places = [(row, column) for row in range(len(lake)) for column in range(len(lake[0]))]
    start = next(place for place in places if lake[place[0]][place[1]] == "S")
    ways: dict[tuple[int, int], list[str]] = {start: []}
    for place in (queue := [start]):
        if lake[place[0]][place[1]] == "G":
            return ways[place]
        for move in ACTIONS:
            there = (place[0] + _MOVES[move][0], place[1] + _MOVES[move][1])
            if there in places and there not in ways and lake[there[0]][there[1]] != "H":
                ways[there] = [*ways[place], move]
                queue.append(there)
    raise DataError(f"the lake {'/'.join(lake)} cannot be crossed.")


def _row(lake: FrozenLake, instruction: str, split: str, index: int, each: Map) -> Row:
    extra = {"seed": index, "make": {"desc": list(each)}}
    text = f"{instruction}\n\n{lake.first({'extra_info': extra})}"
    way = " ".join(shortest_way(each))
    return row(DATA_SOURCE, text, way, ability="game", split=split, index=index, extra=extra)


def convert(options: argparse.Namespace) -> Splits:
    """Return the rows for the command-line options."""
    return generate(**{name: value for name, value in vars(options).items() if name != "output"})


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = arguments(__doc__ or "", output="data/frozen_lake")
    parser.add_argument("--num-train", type=at_least(0), default=2048, help="training maps")
    parser.add_argument("--num-test", type=at_least(0), default=128, help="held-out maps")
    parser.add_argument("--sizes", type=at_least(2), nargs="+", default=[4], help="sides of the maps")
    parser.add_argument("--ice", type=float, default=0.8, help="share of a map without holes")
    parser.add_argument("--instruction", default=INSTRUCTION, help="text before the first map")
    parser.add_argument("--seed", type=int, default=0, help="seed of the maps")
    return run(convert, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
