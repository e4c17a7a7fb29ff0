"""Generate rows for the environment that replies "higher" or "lower" (rltrain.agents.ready.guess:Guess).

All numbers are equally frequent. The prompt contains only the bounds, so the rows of a split differ only in the hidden
number.
"""

import argparse
import random
import sys

from rltrain.common.errors import DataError
from rltrain.data_preprocess.common import Row, Splits, arguments, at_least, row, run

DATA_SOURCE = "rltrain/guess_number"
PROMPT = "Guess my number from {low} to {high}."


def generate(num_train: int, num_test: int, *, seed: int, low: int, high: int, prompt: str = PROMPT) -> Splits:
    """Return train and test rows. Raises DataError for empty bounds, and for a prompt with unknown placeholders."""
    if low > high:
        raise DataError(f"--low {low} is above --high {high}.")
    try:
        text = prompt.format(low=low, high=high)
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"--prompt {prompt!r}: it may contain {{low}} and {{high}} only ({error}).") from error
    chance = random.Random(seed)
    return {
        split: [_row(text, split, index, low, high, number) for index, number in enumerate(numbers)]
        for split, numbers in (
            ("train", _numbers(num_train, chance, low, high)),
            ("test", _spread(num_test, low, high)),
        )
    }


def _spread(most: int, low: int, high: int) -> list[int]:
    """Return at most ``most`` numbers, evenly spread over the bounds."""
    size = high - low + 1
    count = min(most, size)
    return [low + index * size // count for index in range(count)]


def _numbers(count: int, chance: random.Random, low: int, high: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += chance.sample(range(low, high + 1), min(high - low + 1, count - len(numbers)))
    return numbers


def _row(text: str, split: str, index: int, low: int, high: int, number: int) -> Row:
    hidden = {"low": low, "high": high, "number": number}
    return row(DATA_SOURCE, text, str(number), ability="game", split=split, index=index, extra=hidden)


def convert(options: argparse.Namespace) -> Splits:
    """Return the rows for the command-line options."""
    given = vars(options)
    return generate(**{name: value for name, value in given.items() if name != "output"})


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = arguments(__doc__ or "", output="data/guess_number")
    parser.add_argument("--num-train", type=at_least(0), default=2048, help="training rows")
    parser.add_argument("--num-test", type=at_least(0), default=256, help="test rows, each with another number")
    parser.add_argument("--low", type=int, default=1, help="the smallest number")
    parser.add_argument("--high", type=int, default=31, help="the largest number")
    parser.add_argument("--prompt", default=PROMPT, help="prompt, with placeholders for the bounds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order")
    return run(convert, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
