"""Control flow of a trajectory: a user's agent runs it, or tools reply to calls and the environment to other turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from rltrain.agents.calling import call_user
from rltrain.agents.chat import Chat, Over, TrajectoryStart, Turn, TurnLimits, with_timeout
from rltrain.agents.endpoint import ended_by_endpoint
from rltrain.agents.toolbox import Session
from rltrain.common.plugin import load_plugin

_AGENT_KEY = "actor_rollout_ref.rollout.agent.default_agent_loop"


async def run_trajectory(chat: Chat, session: Session, start: TrajectoryStart, limits: TurnLimits) -> dict[str, float]:
    """Run a trajectory to its end. Return ``score``, if it scores itself, and its other numbers."""
    returned = None
    try:
        if start.agent:
            returned = await call_user(_agent(start.agent), chat, start.row, start.seed)
        else:
            await answer_turns(chat, session, limits)
    except Exception as error:
        if not (isinstance(error, Over) or ended_by_endpoint(error)):
            raise
    return _numbers(await score_of(session, chat, limits) if returned is None else returned)


@cache
def _agent(place: str) -> Callable[..., Any]:
    return load_plugin(_AGENT_KEY, place)


def _numbers(returned: Any) -> dict[str, float]:
    """Convert an agent's return value to ``score`` and other numbers. Raises ValueError for invalid values."""
    values = {} if returned is None else returned if isinstance(returned, dict) else {"score": returned}
    try:
        return {str(name): float(value) for name, value in values.items()}
    except (TypeError, ValueError):
        raise ValueError(
            f"{returned!r:.200} is not a valid score. Return a number, or a dict of numbers with the key 'score'."
        ) from None


async def answer_turns(chat: Chat, session: Session, limits: TurnLimits) -> None:
    """Reply until the policy calls no more tools, or the environment is done. Raises `Over` if no turn follows."""
    while True:
        turn = await chat.reply()
        if (turn.calls or turn.problems) and session.names:
            if turn.finish != "stop":
                raise Over
            await chat.answer_calls(turn)
        elif await _is_done(chat, turn, session, limits):
            return


async def _is_done(chat: Chat, turn: Turn, session: Session, limits: TurnLimits) -> bool:
    step = getattr(session.environment, "step", None)
    if step is None or turn.finish == "length":
        return True  # a truncated turn is not a move
    returned = await with_timeout(call_user(step, turn.text), limits.timeout_s)
    try:
        observation, reward, done = returned
        chat.reward(reward)
    except (TypeError, ValueError):
        raise ValueError(f"step() returned {returned!r:.200}; it must return (observation, reward, done).") from None
    if done:
        return True
    if isinstance(observation, str):
        observation = {"role": "user", "content": observation}
    try:
        for message in [observation] if isinstance(observation, dict) else observation:
            chat.add(message["role"], message["content"])
    except (KeyError, TypeError):
        raise ValueError(
            f"step() returned the observation {observation!r:.200}; it must be a text, a message or a list of "
            "messages, each with role and content."
        ) from None
    return False


async def score_of(session: Session, chat: Chat, limits: TurnLimits) -> Any:
    """Return the trajectory's score: from ``score()``, else the sum of the step rewards; None without either."""
    score = getattr(session.environment, "score", None)
    if score is not None:
        return await with_timeout(call_user(score), limits.timeout_s)
    return sum(chat.rewards) if getattr(session.environment, "step", None) else None
