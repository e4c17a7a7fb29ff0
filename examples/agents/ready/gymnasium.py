"""Environments of gymnasium as conversations: observations are rendered as text, and turns are parsed as actions.

The first observation is in the row's prompt (`TextEnv.first` writes it), so an environment starts with its row's seed,
``extra_info.seed``, and all responses to a prompt start in the same state. A row may set arguments of
``gymnasium.make`` (``extra_info.make``) only if the configuration names them: an argument may choose a file or code.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rltrain.common.errors import ConfigError, DataError
from rltrain.common.plugin import load_plugin

_KEY = "actor_rollout_ref.rollout.multi_turn.environment_kwargs"
# Escape sequences of terminal colours.
_COLOURED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0?m", re.DOTALL)
_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "", "")
_WORD = re.compile(r"\w+")


class TextEnv:
    """An environment of gymnasium with a discrete space of actions.

    Args:
        env_id: Such as ``Taxi-v4``.
        actions: Names of the actions in their order; the last one in a turn is taken. Without them a number is taken.
        render: ``FILE.py:NAME`` of ``function(env, observation) -> str``; else what the environment renders as text
            (``render_mode="ansi"``), or the observation as it is with ``make={"render_mode": None}``.
        parse: ``FILE.py:NAME`` of ``function(text, env) -> action or None``.
        make: Arguments of ``gymnasium.make``.
        make_from_row: Names of further arguments, which a row sets in ``extra_info.make``.
        max_steps: Steps after which it is over.

    Raises ConfigError without gymnasium, and for an unknown environment.
    """

    def __init__(
        self,
        env_id: str,
        actions: Sequence[str] = (),
        render: str | None = None,
        parse: str | None = None,
        make: Mapping[str, Any] | None = None,
        make_from_row: Sequence[str] = (),
        max_steps: int | None = None,
    ) -> None:
        self._gymnasium = _imported()
        try:
            self._gymnasium.spec(env_id)
        except self._gymnasium.error.Error as error:
            raise ConfigError(f"{_KEY}.env_id={env_id}: gymnasium reports: {error}") from error
        self._id, self._make, self._max_steps = env_id, dict(make or {}), max_steps
        self._from_row = make_from_row
        self._actions = [name.lower() for name in actions]
        self._render: Callable[..., str] = load_plugin(f"{_KEY}.render", render) if render else _rendered
        self._parse: Callable[..., Any] = load_plugin(f"{_KEY}.parse", parse) if parse else self._named
        self._env: Any = None
        self._total, self._steps = 0.0, 0

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Start with the seed of the row, or ``seed`` if it has none."""
        self.first(row, seed)

    def first(self, row: Mapping[str, Any], seed: int = 0) -> str:
        """Return the first observation of a row as text, for its prompt."""
        self.close()
        extra = row.get("extra_info") or {}
        # Parquet adds nulls for fields that a row lacks.
        row_arguments = {name: value for name, value in (extra.get("make") or {}).items() if value is not None}
        if refused := row_arguments.keys() - set(self._from_row):
            allow = f"{_KEY}.make_from_row=[{sorted(refused)[0]}]"
            raise DataError(f"extra_info.make.{sorted(refused)[0]} of a row is not allowed; set {allow} to allow it.")
        self._env = self._gymnasium.make(self._id, **{"render_mode": "ansi", **self._make, **row_arguments})
        self._total, self._steps = 0.0, 0
        observation, _ = self._env.reset(seed=int(extra.get("seed", seed)))
        return self._render(self._env, observation)

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the observation after a turn, the reward of the turn, and whether the episode is over."""
        self._steps += 1
        late = self._max_steps is not None and self._steps >= self._max_steps
        action = self._parse(text, self._env)
        if action is None:
            return f"That is not an action. {self._advice()}".strip(), 0.0, late
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._total += float(reward)
        return self._render(self._env, observation), float(reward), bool(terminated or truncated or late)

    def score(self) -> dict[str, float]:
        """Return ``score``, the sum of the rewards."""
        return {"score": self._total, "steps": float(self._steps)}

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _named(self, text: str, env: Any) -> int | None:
        words = _WORD.findall(text.lower())
        if self._actions:
            named = [self._actions.index(word) for word in words if word in self._actions]
            return named[-1] if named else None
        numbers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 9]
        return numbers[-1] if numbers and numbers[-1] < env.action_space.n else None

    def _advice(self) -> str:
        if self._actions:
            return f"Say one of {', '.join(self._actions)}."
        return f"Say a number from 0 to {self._env.action_space.n - 1}." if self._parse == self._named else ""


def _rendered(env: Any, observation: Any) -> str:
    if env.render_mode != "ansi":
        return str(observation)
    return _COLOURED.sub(_in_words, env.render()).strip()


def _in_words(piece: re.Match[str]) -> str:
    """Return coloured text with its colour in words, because only the colour may mark the player."""
    code, text = piece.groups()
    colours = [_NAMES[int(number) % 10] for number in code.split(";") if 30 <= int(number or 0) <= 47]
    return f"<{' '.join(colours)} {text}>" if colours else text


def _imported() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            "environments of gymnasium need the package: pip install gymnasium, or rltrain[gymnasium]."
        ) from error
    return gymnasium
