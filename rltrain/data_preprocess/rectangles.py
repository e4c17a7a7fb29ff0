"""Generate rectangles on squared paper and ask for their area. No downloads; equal options give equal files."""

import argparse
import random
import struct
import sys
import zlib

import numpy as np

from rltrain.data_preprocess.common import Row, Splits, arguments, at_least, row, run

DATA_SOURCE = "rltrain/rectangles"
QUESTION = "<image>area=?"
NUM_SQUARES = 3  # squares along an edge of the paper
# Pixels along an edge of a square. A square is one token of Qwen2-VL and Qwen2.5-VL.
SQUARE = 28
_LINE = 200
_EDGES = range(1, NUM_SQUARES + 1)
AREAS = sorted({width * height for width in _EDGES for height in _EDGES})
# Lighter ink could not be distinguished from the paper.
_DARKEST, _LIGHTEST = 0, 160


def draw(rng: random.Random, area: int) -> np.ndarray:
    """Draw a rectangle that covers ``area`` squares, anywhere on the paper. Returns an image [84, 84, 3] (uint8)."""
    width, height = rng.choice([(width, height) for width in _EDGES for height in _EDGES if width * height == area])
    left, top = rng.randint(0, NUM_SQUARES - width), rng.randint(0, NUM_SQUARES - height)
    image = paper()
    image[::SQUARE] = image[:, ::SQUARE] = _LINE
    ink = [rng.randint(_DARKEST, _LIGHTEST) for _ in range(3)]
    image[SQUARE * top + 1 : SQUARE * (top + height), SQUARE * left + 1 : SQUARE * (left + width)] = ink
    return image


def paper() -> np.ndarray:
    """Return a white image [84, 84, 3]."""
    return np.full((NUM_SQUARES * SQUARE, NUM_SQUARES * SQUARE, 3), 255, dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """Encode ``pixels`` [height, width, 3] (uint8) as PNG, without any package."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # 0: an unfiltered line
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(lines)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def generate(num_train: int, num_test: int, *, seed: int, blank: bool = False) -> dict[str, list[Row]]:
    """Return train and test rows with distinct images. blank: the same rows with white images.

    All areas are equally frequent, so a model that sees no image is right in one of six cases.
    """
    rng, seen, white = random.Random(seed), set[bytes](), png(paper())
    rows: list[Row] = []
    while len(rows) < num_train + num_test:
        area = AREAS[len(rows) % len(AREAS)]
        image = png(draw(rng, area))
        if image in seen:
            continue
        seen.add(image)
        split, index = ("test", len(rows)) if len(rows) < num_test else ("train", len(rows) - num_test)
        images = [{"bytes": white if blank else image, "path": None}]
        rows.append(row(DATA_SOURCE, QUESTION, str(area), ability="math", split=split, index=index, images=images))
    return {"train": rows[num_test:], "test": rows[:num_test]}


def convert(options: argparse.Namespace) -> Splits:
    """Return the rows for the command-line options."""
    return generate(options.num_train, options.num_test, seed=options.seed, blank=options.blank)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = arguments(__doc__ or "", output="data/rectangles")
    parser.add_argument("--num-train", type=at_least(0), default=2048, help="training images")
    parser.add_argument("--num-test", type=at_least(0), default=256, help="held-out images")
    parser.add_argument("--blank", action="store_true", help="write white images, as a control")
    parser.add_argument("--seed", type=int, default=0, help="seed of the images")
    return run(convert, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
