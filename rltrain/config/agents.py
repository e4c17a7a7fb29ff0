"""Settings of conversations: whether a run is multi-turn, and the keys that configure the replies."""

from __future__ import annotations

from rltrain.config.schema.rollout import RolloutConfig

AGENT_KEY = "actor_rollout_ref.rollout.agent.default_agent_loop"
LOOPS_KEY = "actor_rollout_ref.rollout.agent.agent_loops"
SINGLE_TURN, TOOLS, ENVIRONMENT = NAMES = ("single_turn_agent", "tool_agent", "env_agent")


def several_turns(rollout: RolloutConfig) -> bool:
    """Return whether a turn of the policy can get a reply."""
    turns = rollout.multi_turn
    return turns.enable is not False and bool(turns.place or rollout.agent.own or turns.enable)


def who_answers(rollout: RolloutConfig) -> str:
    """Return the settings of the tools, environment or agent that reply, for messages."""
    places = [f"{key}={place}" for key, place in rollout.multi_turn.places.items()]
    if agents := rollout.agent.own:
        places.append(f"{AGENT_KEY if rollout.agent.default_agent_loop == agents[0] else LOOPS_KEY}={agents[0]}")
    return " ".join(places) or "actor_rollout_ref.rollout.multi_turn.enable=True"
