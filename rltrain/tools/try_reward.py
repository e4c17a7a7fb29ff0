"""Try a reward function on rows of a parquet file, in this process: its prints are shown, and breakpoint() works.

    rltrain rewards try my_reward.py train.parquet
    rltrain rewards try my_reward.py train.parquet --answers answers.txt --kwargs scale=2
    rltrain rewards try judge train.parquet --kwargs url=http://host:8000/v1 model=NAME

Without --answers the responses to a row are its ground truth in the forms that scorers read, a wrong response, and a
list of numbers that contains the ground truth. A scorer that rewards such a list teaches a policy to guess.
Exit code 0: every response got a number; 2: one did not, or nothing could be tried.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.table import Table
from rich.text import Text

from rltrain.common.errors import ConfigError, RewardError, command, short
from rltrain.common.logs import SanitizedConsole
from rltrain.common.plugin import user_traceback
from rltrain.config.check import broken_rules
from rltrain.config.load import load_config
from rltrain.data.rows import Rows, read_rows
from rltrain.rewards.custom import CustomReward, RewardFunction
from rltrain.rewards.processes.judging import Questions
from rltrain.rewards.processes.remote_judge import RemoteJudge
from rltrain.rewards.processes.score import ScorerCall, parse_result
from rltrain.rewards.processes.trial import truth_of
from rltrain.rewards.scorers.registry import FORMS

Scored = tuple[float, dict[str, float | str]]

_JUDGE = "judge"
WRONG = "I do not know."
_SHOWN_CHARS = 60
_short = partial(short, most=_SHOWN_CHARS)


@command
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(argv)
    rows = read_rows(options.data)
    scorer = _Judge(options.kwargs, rows) if options.reward == _JUDGE else _Function(options, rows)
    answers = list(_given(options.answers, rows) if options.answers else _made_up(rows, options.rows))
    table = Table("row", "data source", "answer", "ground truth", "score", "further", "seconds")
    failures: dict[tuple, str] = {}
    earned: dict[tuple[int, str], float] = {}
    for position, answer in answers:
        row = rows[position]
        started = time.perf_counter()
        try:
            score, extras = scorer.score(position, (row.data_source, answer, row.ground_truth, row.extra_info))
            earned[position, answer] = score
            outcome = [f"{score:g}", " ".join(f"{name}={value}" for name, value in extras.items())]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: what it raises is shown with its traceback
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = str(error) if isinstance(error, RewardError) else user_traceback(error)
            failure = f"row {position}, answer {answer[:_SHOWN_CHARS]!r}:\n{said}"
            # One failure is kept per place in the user's code, so that the same failure on every row is shown once.
            failures.setdefault((type(error), where.filename, where.lineno), failure)
            outcome = [type(error).__name__, ""]
        cells = [str(position), row.data_source, _short(answer), _short(row.ground_truth), *outcome]
        table.add_row(*map(Text, [*cells, f"{time.perf_counter() - started:.3f}"]))
    console = SanitizedConsole(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if not options.answers and (warning := _guesses_pay(earned, rows)):
        console.print(Text(warning), soft_wrap=True)
    for failure in failures.values():
        console.print(Text(f"failed, {failure}"), soft_wrap=True)
    if said := scorer.close():
        console.print(Text(said), soft_wrap=True)
    return 2 if failures else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "rltrain rewards try", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reward", help="custom_reward_function.path of the run, or judge")
    parser.add_argument("data", help="a parquet file with rows of the run")
    parser.add_argument("--name", default="compute_score", help="custom_reward_function.name (%(default)s)")
    answers = 'one response per line, for rows 0, 1, …; in a .jsonl file a text, or {"answer": …, "row": …}'
    parser.add_argument("--answers", type=Path, metavar="FILE", help=answers)
    first = "try the first N rows, and one per data source (%(default)s)"
    parser.add_argument("--rows", type=int, default=3, metavar="N", help=first)
    kwargs = "custom_reward_function.reward_kwargs; of a judge the keys of reward.judge"
    parser.add_argument("--kwargs", nargs="*", default=[], metavar="KEY=VALUE", help=kwargs)
    batch = "the function takes lists (reward_model.reward_manager=batch)"
    parser.add_argument("--batch", action="store_true", help=batch)
    return parser.parse_args(argv)


def _given(file: Path, rows: Rows) -> Iterator[tuple[int, str]]:
    """Yield rows and their responses from ``file``."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            value = json.loads(line) if file.suffix == ".jsonl" else line
            position, answer = number, value
            if isinstance(value, dict):
                position, answer = value.get("row", number), value["answer"]
            if not 0 <= position < len(rows):
                raise RewardError(f"--answers {file}: line {number + 1} answers row {position} of {len(rows)}.")
            yield position, str(answer)
    except (OSError, ValueError, KeyError) as error:
        raise RewardError(f'--answers {file}: {error!r}. A line is a text, or {{"answer": …, "row": …}}.') from None


def _made_up(rows: Rows, number: int) -> Iterator[tuple[int, str]]:
    for position in sorted({*range(min(number, len(rows))), *rows.data_sources().values()}):
        truth = truth_of(rows[position])
        for form in FORMS:
            yield position, form.format(truth)
        yield position, WRONG
        yield position, _guesses(truth)


def _guesses(truth: str) -> str:
    """Return the ground truth among other numbers, neither first nor last."""
    first, *others = (number for number in ("1", "2", "3", "4") if number != truth)
    return " ".join([first, truth, *others])


def _guesses_pay(earned: dict[tuple[int, str], float], rows: Rows) -> str:
    """Return a warning if a list of guesses scored higher than a wrong response, else ""."""
    for (position, answer), score in earned.items():
        if answer == _guesses(truth_of(rows[position])) and score > earned.get((position, WRONG), score):
            return (
                f"warning: row {position}, response {_short(answer)!r} earned {score:g}: it contains the ground truth "
                "among other numbers, so a policy can learn to list guesses. Compare the whole response, or the last "
                "number of it."
            )
    return ""


class _Function:
    """The user's function, in this process."""

    def __init__(self, options: argparse.Namespace, rows: Rows) -> None:
        kwargs: Any = OmegaConf.to_container(OmegaConf.from_dotlist(options.kwargs))  # as in a run
        self._custom = CustomReward(options.reward, options.name, kwargs, options.batch)
        self._function = RewardFunction(self._custom)

    def score(self, position: int, call: ScorerCall) -> Scored:
        if not self._custom.batch:
            return parse_result(self._function(*call))
        (returned,) = self._function(*([argument] for argument in call))
        return parse_result(returned)

    def close(self) -> str:
        return ""


class _Judge:
    """The judge of a run with these keys."""

    def __init__(self, settings: Sequence[str], rows: Rows) -> None:
        # rule=beside requires a weight, but nothing is weighted here.
        loaded = load_config(["reward.weights.judge=1", *(f"reward.judge.{setting}" for setting in settings)])
        judge = loaded.config.reward.judge
        if judge.url is None:
            raise ConfigError("a judge needs --kwargs url=http://host:port/v1 model=NAME (keys of reward.judge).")
        # The other settings of the run are unknown, so defaults are used.
        if problems := [problem for problem in broken_rules(loaded) if "reward.judge" in problem]:
            raise ConfigError("\n".join(problems))
        self._judged, self._deadline_s = RemoteJudge(loaded.config.scoring), judge.deadline_s
        self._questions = Questions(rows, judge.images)

    def score(self, position: int, call: ScorerCall) -> Scored:
        (score,) = self._judged.score_all([call], [partial(self._questions, position)], self._deadline_s)
        if score.value is None:
            raise RewardError(f"{score.status}: {score.error}")
        return score.value, score.extras

    def close(self) -> str:
        counts = self._judged.take_counts()
        self._judged.close()
        return "judge: " + ", ".join(f"{name} {counts[name]:g}" for name in sorted(counts))


if __name__ == "__main__":
    sys.exit(main())
