"""Which function scores a data source, and how a user's own function is loaded.

A scorer is ``(solution_str, ground_truth, extra_info) -> float`` or a dict with ``score`` and extra columns. It runs in a
process of its own with a deadline (``slot``); still, it never evaluates the answer's text and reads it in linear time.
"""

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rltrain.errors import RewardError
from rltrain.plugin import NotPythonError, import_file

Verdict = float | dict[str, Any]
Scorer = Callable[[str, Any, dict[str, Any]], Verdict]
SourceScorer = Callable[[str, str, Any, dict[str, Any]], Verdict]

_MODULES = (
    *("arithmetic", "boba", "clevr_count", "code", "dapo", "geometry3k", "gsm8k"),
    *("math_boxed", "qa", "reasoning_gym", "virl39k"),
)
# Ways to write a reference answer down, one of which every scorer reads.
FORMS = ("{}", "\\boxed{{{}}}", "Answer: {}", "#### {}", "<answer>{}</answer>", "[{}]")
_scorers: dict[str, Scorer] = {}
_preparations: dict[str, Callable[[str], None]] = {}


@dataclass(frozen=True)
class CustomReward:
    """``custom_reward_function``: function ``name`` of the Python file ``path``, called with ``kwargs`` besides.

    ``batch``: it takes lists (data_sources, solution_strs, ground_truths, extra_infos) and returns one verdict for each answer.
    """

    path: str
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of what the function is called with, as verl has them."""
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        return tuple(f"{name}s" for name in names) if self.batch else names


def scorer(*data_sources: str, prepare: Callable[[str], None] | None = None) -> Callable[[Scorer], Scorer]:
    """Register a scorer for data sources; one that ends in ``*`` stands for all that begin so.

    ``prepare(data_source)`` runs before the first answer is scored and outside its deadline: slow imports go there.
    """

    def register(function: Scorer) -> Scorer:
        for source in data_sources:
            _scorers[source] = function
            if prepare is not None:
                _preparations[source] = prepare
        return function

    return register


def known_sources() -> list[str]:
    """Every data source that has a scorer."""
    for module in _MODULES:
        importlib.import_module(f"rltrain.rewards.{module}")
    return sorted(_scorers)


def find_scorer(data_source: str) -> Scorer:
    """The scorer of a data source, ready to be called. Raises RewardError for an unknown one."""
    name = _match(data_source)
    if name in _preparations:
        _preparations[name](data_source)
    return _scorers[name]


def check_sources(data_sources: Iterable[str]) -> None:
    """Raise RewardError if a data source has no scorer."""
    for source in data_sources:
        _match(source)


def _match(data_source: str) -> str:
    known = known_sources()
    if data_source in known:
        return data_source
    for name in known:
        if name.endswith("*") and data_source.startswith(name[:-1]):
            return name
    raise RewardError(
        f"no scorer for data_source={data_source!r}. Known: {', '.join(known)}. Give your own with "
        "custom_reward_function.path=my_reward.py custom_reward_function.name=compute_score."
    )


def load_custom(custom: CustomReward) -> SourceScorer:
    """The user's function, called by keyword as verl calls it (`CustomReward.arguments`).

    An ``async`` one is awaited. Raises RewardError with the traceback if its file cannot be imported.
    """
    path = Path(custom.path).expanduser()
    if not path.is_file():
        raise RewardError(f"custom_reward_function.path={custom.path!r} is not a file (looked at {path.absolute()}).")
    module = _import_file(path, custom.path)
    function = getattr(module, custom.name, None)
    if not callable(function):
        members = inspect.getmembers(module, inspect.isfunction)
        names = [name for name, value in members if value.__module__ == module.__name__]
        raise RewardError(
            f"{custom.path!r} has no function custom_reward_function.name={custom.name!r}; "
            f"it defines {', '.join(names) or 'none'}."
        )
    _check_signature(function, custom)

    def call(*values: Any) -> Any:
        value = function(**dict(zip(custom.arguments, values, strict=True)), **custom.kwargs)
        return _event_loop().run_until_complete(value) if inspect.isawaitable(value) else value

    return call


@cache
def _event_loop() -> Any:
    """One for all answers, so that an asynchronous function can keep its connections from one to the next."""
    import asyncio

    return asyncio.new_event_loop()


_CUSTOM_MODULE = "rltrain_custom_reward"


def _import_file(path: Path, shown: str) -> Any:
    try:
        return import_file(path, _CUSTOM_MODULE)
    except NotPythonError:
        raise RewardError(f"custom_reward_function.path={shown!r} is not a Python file (.py).") from None
    except BaseException as error:  # noqa: BLE001 - user code; whatever it raises is reported with its traceback
        raise RewardError(
            f"custom_reward_function.path={shown!r} cannot be imported:\n{user_traceback(error)}"
        ) from None


def _check_signature(function: Callable[..., Any], custom: CustomReward) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none
        return
    arguments = dict.fromkeys(custom.arguments)
    try:
        signature.bind(**arguments, **custom.kwargs)
    except TypeError as error:
        names = ", ".join([*arguments, *custom.kwargs])
        raise RewardError(
            f"{custom.name}{signature} in {custom.path!r} cannot be called with {names} by keyword: {error}. "
            f"Write def {custom.name}({', '.join(custom.arguments)}, **kwargs)."
        ) from None


def user_traceback(error: BaseException) -> str:
    """The traceback below our own call, bounded; with the place of the error even for a syntax error."""
    frames = traceback.format_exception(type(error), error, error.__traceback__)
    own = tuple(
        f'File "{(Path(__file__).parent / name).resolve()}"'
        for name in ("registry.py", "child.py", "try.py", "../plugin.py")
    )
    kept = [frame for frame in frames if not frame.lstrip().startswith((*own, 'File "<frozen importlib'))]
    return "".join(kept)[-4000:].rstrip()
