"""Generate arithmetic problems such as ``12+7=?``. Nothing is downloaded; equal options give equal files."""

import argparse
import random
import sys

from rltrain.common.errors import DataError
from rltrain.data_preprocess.common import Row, Splits, arguments, at_least, row, run

DATA_SOURCE = "rltrain/arithmetic"
MAX_OPERAND = 10**9
_COMPUTE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}

Problem = tuple[str, int, int]


def generate(
    num_train: int, num_test: int, *, seed: int, max_operand: int, operators: str, min_operand: int = 0
) -> dict[str, list[Row]]:
    """Return train and test rows. No test problem is in train, not even with its operands swapped (7+12 for 12+7).

    Test problems are distinct. Train problems are distinct until all possible ones are used, and then repeat.
    """
    unknown = sorted(set(operators) - set(_COMPUTE))
    if unknown or not operators:
        raise DataError(
            f"--operators {operators!r}: choose from {''.join(_COMPUTE)} (no division: answers are integers)."
        )
    if not 1 <= max_operand <= MAX_OPERAND:
        raise DataError(f"--max-operand {max_operand} is not between 1 and {MAX_OPERAND}.")
    if not 0 <= min_operand <= max_operand:
        raise DataError(f"--min-operand {min_operand} is not between 0 and --max-operand {max_operand}.")
    drawn = _draw(4 * (num_train + num_test) + 4, seed, range(min_operand, max_operand + 1), operators)
    test: dict[Problem, Problem] = {}
    for problem in drawn:
        if len(test) < num_test:
            test.setdefault(_key(problem), problem)
    train = [problem for problem in drawn if _key(problem) not in test]
    if len(test) < num_test or (num_train and not train):
        raise DataError(
            f"--min-operand {min_operand} --max-operand {max_operand} with --operators {operators!r} has too few "
            f"problems for {num_test} held-out ones. Try a larger --max-operand or a smaller --num-test."
        )
    repeated = [train[i % len(train)] for i in range(num_train)]
    return {"train": _rows(repeated, "train"), "test": _rows(list(test.values()), "test")}


def _draw(count: int, seed: int, operands: range, operators: str) -> list[Problem]:
    """Return up to ``count`` distinct problems in random order."""
    operators, size = "".join(dict.fromkeys(operators)), len(operands)
    space = len(operators) * size * size
    numbers = random.Random(seed).sample(range(space), min(count, space))
    return [(operators[n // (size * size)], operands[n // size % size], operands[n % size]) for n in numbers]


def _key(problem: Problem) -> Problem:
    operator, a, b = problem
    return problem if operator == "-" else (operator, min(a, b), max(a, b))


def _rows(problems: list[Problem], split: str) -> list[Row]:
    return [
        row(
            DATA_SOURCE,
            f"{a}{operator}{b}=?",
            str(_COMPUTE[operator](a, b)),
            ability="math",
            split=split,
            index=index,
        )
        for index, (operator, a, b) in enumerate(problems)
    ]


def convert(options: argparse.Namespace) -> Splits:
    """Return the rows for the command-line options."""
    return generate(
        options.num_train,
        options.num_test,
        seed=options.seed,
        max_operand=options.max_operand,
        min_operand=options.min_operand,
        operators=options.operators,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = arguments(__doc__ or "", output="data/arithmetic")
    parser.add_argument("--num-train", type=at_least(0), default=2048, help="training problems")
    parser.add_argument("--num-test", type=at_least(0), default=256, help="held-out problems")
    parser.add_argument("--max-operand", type=at_least(1), default=99, help="largest operand")
    parser.add_argument("--min-operand", type=at_least(0), default=0, help="smallest operand")
    parser.add_argument("--operators", default="+", help="operators: any of + - *")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems")
    return run(convert, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
