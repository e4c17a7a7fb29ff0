"""Which scorer belongs to a data source.

A scorer is a function ``(solution_str, ground_truth, extra_info)`` that returns a number, or a dict with ``score`` and
further columns. It must read the answer in linear time and never evaluate its text, although it runs in a process of
its own with a deadline: a deadline that is spent costs seconds, and a process is no sandbox.

Scorers are found by importing every module of ``scorers/``, so that a new one is one new file. That takes a few
milliseconds, because a scorer's own imports are cheap: slow ones belong in ``prepare``, which runs only for the data
sources of the run. A ``summary`` says what no single answer can: it sees all answers of a data source. There are no
entry points for other packages: ``custom_reward_function`` is the way in for them.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from rltrain.base.errors import RewardError
from rltrain.rewards import scorers

Scorer = Callable[[str, Any, dict[str, Any]], float | dict[str, Any]]
# The extra_info and the accuracy of each row -> names and values; {} where the rows do not tell.
Summary = Callable[[Sequence[dict[str, Any]], Sequence[float]], dict[str, float]]

# Ways to write a reference answer down, one of which every scorer reads.
# How a run is given a scorer, in errors.
OWN_SCORER = "custom_reward_function.path=my_reward.py custom_reward_function.name=compute_score"
FORMS = ("{}", "\\boxed{{{}}}", "Answer: {}", "#### {}", "<answer>{}</answer>", "[{}]")

_scorers: dict[str, Scorer] = {}
_preparations: dict[str, Callable[[str], None]] = {}
_summaries: dict[str, Summary] = {}


def scorer(
    *data_sources: str, prepare: Callable[[str], None] | None = None, summary: Summary | None = None
) -> Callable[[Scorer], Scorer]:
    """Register a scorer for data sources. A name that ends in ``*`` stands for all data sources that begin so.

    ``prepare(data_source)`` runs once per process before the first answer, outside its deadline. It makes slow imports
    and raises RewardError where a package is missing. ``summary`` is asked after a validation, for one answer to each
    row at a time; it leaves out rows whose accuracy is no number.
    """

    def register(function: Scorer) -> Scorer:
        for source in data_sources:
            _scorers[source] = function
            if prepare is not None:
                _preparations[source] = prepare
            if summary is not None:
                _summaries[source] = summary
        return function

    return register


@cache
def known_sources() -> list[str]:
    """Every data source that has a scorer."""
    for module in pkgutil.iter_modules(scorers.__path__, f"{scorers.__name__}."):
        # The import alone registers: each file decorates its scorer.
        importlib.import_module(module.name)
    return sorted(_scorers)


def find_scorer(data_source: str) -> Scorer:
    """The scorer of a data source, prepared. Raises RewardError for an unknown data source or a missing package."""
    # `prepare` gets the full data source, of which the name may be a beginning (reasoning_gym/*).
    name = _match(data_source)
    if name in _preparations:
        _preparations[name](data_source)
    return _scorers[name]


def summary_of(data_source: str) -> Summary | None:
    """What is said of all answers of a data source together; None where nothing is."""
    name = _find(data_source)
    return _summaries.get(name) if name else None


def check_sources(data_sources: Iterable[str]) -> None:
    """Raise RewardError if a data source has no scorer."""
    for source in data_sources:
        _match(source)


def _find(data_source: str) -> str | None:
    sources = known_sources()
    if data_source in sources:
        return data_source
    return next((name for name in sources if name.endswith("*") and data_source.startswith(name[:-1])), None)


def _match(data_source: str) -> str:
    name = _find(data_source)
    if name is not None:
        return name
    raise RewardError(
        f"no scorer for data_source={data_source!r}. Known: {', '.join(known_sources())}. Give your own with "
        f"{OWN_SCORER}."
    )
