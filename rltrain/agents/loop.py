"""What answers the policy where no agent of the user's does: tools where a turn calls some, else the environment."""

from __future__ import annotations

from typing import Any

from rltrain.agents.calling import called
from rltrain.agents.chat import Chat, Over, Terms, Turn, within
from rltrain.agents.toolbox import Session


async def answer_turns(chat: Chat, session: Session, terms: Terms) -> None:
    """Until the policy calls no tool any more, or the environment is done. Raises `Over` where no turn follows."""
    while True:
        turn = await chat.reply()
        if (turn.calls or turn.problems) and session.names:
            if turn.finish != "stop":
                raise Over
            await chat.answer_calls(turn)
        elif await _is_done(chat, turn, session, terms):
            return


async def _is_done(chat: Chat, turn: Turn, session: Session, terms: Terms) -> bool:
    step = getattr(session.environment, "step", None)
    if step is None or turn.finish == "length":
        return True  # half a turn is no move
    returned = await within(called(step, turn.text), terms.timeout_s)
    try:
        observation, reward, done = returned
        chat.reward(reward)
    except (TypeError, ValueError):
        raise ValueError(f"step() returned {returned!r:.200}; it returns (observation, reward, done).") from None
    if done:
        return True
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    for message in messages:
        chat.add(message["role"], message["content"])
    return False


async def score_of(session: Session, chat: Chat, terms: Terms) -> Any:
    """The score that a trajectory gives itself: of ``score()``, else all rewards of steps; None without either."""
    score = getattr(session.environment, "score", None)
    if score is not None:
        return await within(called(score), terms.timeout_s)
    return sum(chat.rewards) if getattr(session.environment, "step", None) else None
