"""Generate videos of a square that moves on paper and ask for its direction. No downloads, and no decoder is needed."""

import argparse
import random
import sys

import numpy as np

from rltrain.data_preprocess.common import Row, Splits, arguments, at_least, row, run
from rltrain.data_preprocess.rectangles import SQUARE, png

DATA_SOURCE = "rltrain/moving_square"
QUESTION = "<video>way=?"
NUM_FRAMES = 4
# Squares along an edge of the paper.
NUM_SQUARES = 2
FRAMES_PER_SECOND = 2.0
DIRECTIONS = ("up", "right", "down", "left")  # the answers are 1 to 4


def draw(rng: random.Random, direction: int) -> list[np.ndarray]:
    """Draw the frames [56, 56, 3] (uint8) of a square of any colour that crosses the paper. direction: from 0."""
    lane, ink = SQUARE * rng.randrange(NUM_SQUARES), [rng.randint(0, 160) for _ in range(3)]
    frames = []
    # The same places in both directions: otherwise shuffled frames would show the direction.
    places = [SQUARE * (NUM_SQUARES - 1) * step // (NUM_FRAMES - 1) for step in range(NUM_FRAMES)]
    for along in places[::-1] if DIRECTIONS[direction] in ("up", "left") else places:
        top, left = (lane, along) if DIRECTIONS[direction] in ("right", "left") else (along, lane)
        frame = np.full((NUM_SQUARES * SQUARE, NUM_SQUARES * SQUARE, 3), 255, dtype=np.uint8)
        frame[top : top + SQUARE, left : left + SQUARE] = ink
        frames.append(frame)
    return frames


def generate(num_train: int, num_test: int, *, seed: int, shuffled: bool = False) -> dict[str, list[Row]]:
    """Return train and test rows with distinct videos. shuffled: the same frames in random order.

    All directions are equally frequent. In shuffled frames only the axis is visible, so that a model is right in one of
    two cases.
    """
    rng, order, seen = random.Random(seed), random.Random(seed + 1), set[tuple[bytes, ...]]()
    rows: list[Row] = []
    while len(rows) < num_train + num_test:
        direction = len(rows) % len(DIRECTIONS)
        frames = [png(frame) for frame in draw(rng, direction)]
        if tuple(frames) in seen:
            continue
        seen.add(tuple(frames))
        if shuffled:
            order.shuffle(frames)
        split, index = ("test", len(rows)) if len(rows) < num_test else ("train", len(rows) - num_test)
        video = {"video": [{"bytes": frame, "path": None} for frame in frames], "fps": FRAMES_PER_SECOND}
        answer = str(direction + 1)
        rows.append(
            row(DATA_SOURCE, QUESTION, answer, ability="vision", split=split, index=index) | {"videos": [video]}
        )
    return {"train": rows[num_test:], "test": rows[:num_test]}


def convert(options: argparse.Namespace) -> Splits:
    """Return the rows for the command-line options."""
    return generate(options.num_train, options.num_test, seed=options.seed, shuffled=options.shuffled)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = arguments(__doc__ or "", output="data/moving_square")
    parser.add_argument("--num-train", type=at_least(0), default=2048, help="training videos")
    parser.add_argument("--num-test", type=at_least(0), default=256, help="held-out videos")
    parser.add_argument("--shuffled", action="store_true", help="shuffle the frames of each video, as a control")
    parser.add_argument("--seed", type=int, default=0, help="seed of the videos")
    return run(convert, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
