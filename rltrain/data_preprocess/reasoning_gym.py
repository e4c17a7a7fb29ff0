"""Generate problems of a reasoning-gym task (pip install reasoning-gym). Nothing is downloaded."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # when run as a program, this folder, which has a reasoning_gym.py, is first on the path
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

from rltrain.common.errors import DataError
from rltrain.data_preprocess.common import Row, Splits, arguments, at_least, row, run
from rltrain.data_preprocess.gsm8k import DATA_SOURCE as GSM8K
from rltrain.data_preprocess.gsm8k import INSTRUCTION as GSM8K_INSTRUCTION
from rltrain.rewards.scorers.reasoning_gym import PREFIX, check_task

# One worked problem in gsm8k's format, for models that are too small to follow only the instruction.
WORKED_EXAMPLE = [
    {"role": "user", "content": f"Tom has 3 boxes with 4 pens each. How many pens does he have? {GSM8K_INSTRUCTION}"},
    {"role": "assistant", "content": "Each box has 4 pens and there are 3 boxes, so Tom has 3 * 4 = 12 pens.\n#### 12"},
]
INSTRUCTION = "Give your final answer between <answer> and </answer> tags."
_MAX_TEST_DRAWS_PER_ROW = 20
# Entry i of a data set with seed s equals entry i - 1 with seed s + 1, so the seeds of train and test are far apart.
_SEED_STRIDE = 20_000_000


def generate(
    task: str,
    num_train: int,
    num_test: int,
    *,
    seed: int,
    as_gsm8k: bool = False,
    worked_example: bool = False,
    settings: dict[str, Any] | None = None,
) -> dict[str, list[Row]]:
    """Return train rows from ``seed`` and test rows from another stream. No question is in both.

    ``as_gsm8k`` writes rows of openai/gsm8k: its instruction, and a plain number as ground truth; ``worked_example``
    puts one solved problem before the question. ``settings`` are for the task's configuration.
    """
    check_task(task)
    make = _gsm8k_row if as_gsm8k else _task_row
    settings = settings or {}
    train = list(_entries(task, num_train, seed * _SEED_STRIDE, settings))
    questions = {entry["question"] for entry in train}
    test: list[dict[str, Any]] = []
    for entry in _entries(task, num_test * _MAX_TEST_DRAWS_PER_ROW, seed * _SEED_STRIDE + _SEED_STRIDE // 2, settings):
        if len(test) == num_test:
            break
        if entry["question"] not in questions:
            questions.add(entry["question"])
            test.append(entry)
    if len(test) < num_test:
        raise DataError(
            f"reasoning-gym task {task!r} has only {len(test)} questions outside the training set. "
            "Try a smaller --num-train or --num-test."
        )
    rows = {
        split: [make(task, entry, split, index) for index, entry in enumerate(entries)]
        for split, entries in (("train", train), ("test", test))
    }
    if as_gsm8k and worked_example:
        for generated_row in (*rows["train"], *rows["test"]):
            generated_row["prompt"] = [*WORKED_EXAMPLE, *generated_row["prompt"]]
    return rows


def _entries(task: str, size: int, seed: int, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    if size:
        try:
            data = reasoning_gym.create_dataset(task, size=size, seed=seed, **settings)
        except (TypeError, AssertionError) as error:
            raise DataError(f"--settings {settings} do not fit reasoning-gym task {task!r}: {error}") from error
        yield from (data[index] for index in range(size))


def _task_row(task: str, entry: dict[str, Any], split: str, index: int) -> Row:
    try:
        text = json.dumps(entry, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"entries of reasoning-gym task {task!r} cannot be stored as JSON: {error}") from error
    return row(
        PREFIX + task,
        f"{entry['question']}\n{INSTRUCTION}",
        str(entry["answer"]),
        ability="reasoning",
        split=split,
        index=index,
        extra={"task": task, "entry": text},
    )


def _gsm8k_row(task: str, entry: dict[str, Any], split: str, index: int) -> Row:
    truth = str(entry["answer"]).replace(",", "")
    if not truth.removeprefix("-").replace(".", "", 1).isdigit():
        raise DataError(f"--as-gsm8k needs numeric answers; {task!r} answers {truth!r}. Use --task gsm_symbolic.")
    text = f"{entry['question']} {GSM8K_INSTRUCTION}"
    extra = {"question": entry["question"], "answer": f"#### {truth}"}
    return row(GSM8K, text, truth, ability="math", split=split, index=index, extra=extra)


def convert(options: argparse.Namespace) -> Splits:
    """Return the rows for the command-line options."""
    return generate(
        options.task,
        options.num_train,
        options.num_test,
        seed=options.seed,
        as_gsm8k=options.as_gsm8k,
        worked_example=options.worked_example,
        settings=dict(options.settings),
    )


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = arguments(__doc__ or "", output="data/reasoning_gym")
    parser.add_argument("--task", default="chain_sum", help="a reasoning-gym task, such as basic_arithmetic")
    parser.add_argument("--num-train", type=at_least(0), default=1024, help="training problems")
    parser.add_argument("--num-test", type=at_least(0), default=128, help="test problems")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of the problems")
    parser.add_argument(
        "--as-gsm8k", action="store_true", help="write rows of openai/gsm8k, for tasks with numeric answers"
    )
    parser.add_argument(
        "--worked-example", action="store_true", help="with --as-gsm8k: one solved problem before each question"
    )
    parser.add_argument(
        "--settings", nargs="*", type=_setting, default=[], help="name=value of the task, such as max_terms=3"
    )
    return run(convert, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
