"""Registry of scorers by data source.

A scorer is a function ``(solution_str, ground_truth, extra_info)`` that returns a number, or a dict with ``score`` and
other columns. It must parse the response in linear time and never evaluate its text, although it runs in a separate
process with a deadline, because a timeout costs seconds and a process is not a sandbox. Scorers are found by importing
every module in ``scorers/``, so a new scorer is one new file. This takes a few milliseconds, because slow imports
belong in ``prepare``, which runs only for the data sources of the run. A ``summary`` computes a metric over all
responses of a data source. There are no entry points for other packages; they use ``custom_reward_function``.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from rltrain.common.errors import RewardError
from rltrain.rewards import scorers

Scorer = Callable[[str, Any, dict[str, Any]], float | dict[str, Any]]
# (extra_info and accuracy of each row) -> names and values; {} if the rows are not sufficient.
Summary = Callable[[Sequence[dict[str, Any]], Sequence[float]], dict[str, float]]

# Command line to use a custom scorer, for error messages.
OWN_SCORER = "custom_reward_function.path=my_reward.py custom_reward_function.name=compute_score"
FORMS = ("{}", "\\boxed{{{}}}", "Answer: {}", "#### {}", "<answer>{}</answer>", "[{}]")

_scorers: dict[str, Scorer] = {}
_preparations: dict[str, Callable[[str], None]] = {}
_summaries: dict[str, Summary] = {}


def scorer(
    *data_sources: str, prepare: Callable[[str], None] | None = None, summary: Summary | None = None
) -> Callable[[Scorer], Scorer]:
    """Register a scorer for data sources. A name that ends in ``*`` matches all data sources with that prefix.

    ``prepare(data_source)`` runs once per process before the first response, outside its deadline. It does slow imports
    and raises RewardError for a missing package. ``summary`` is called after a validation, for one response to each row
    at a time; it skips rows whose accuracy is not a number.
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
    """Return all data sources that have a scorer."""
    for module in pkgutil.iter_modules(scorers.__path__, f"{scorers.__name__}."):
        # Importing the module registers its scorer.
        importlib.import_module(module.name)
    return sorted(_scorers)


def find_scorer(data_source: str) -> Scorer:
    """Return the prepared scorer of a data source. Raises RewardError for an unknown one or a missing package."""
    # `prepare` gets the full data source, because the registered name may be a prefix (reasoning_gym/*).
    name = _match(data_source)
    if name in _preparations:
        _preparations[name](data_source)
    return _scorers[name]


def summary_of(data_source: str) -> Summary | None:
    """Return the function that summarises all responses of a data source, or None."""
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
