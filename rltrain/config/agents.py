"""Whether anybody answers a turn of the policy, and the settings that say who."""

from __future__ import annotations

from rltrain.config.schema import Config
from rltrain.config.schema.rollout import RolloutConfig

AGENT_KEY = "actor_rollout_ref.rollout.agent.default_agent_loop"
LOOPS_KEY = "actor_rollout_ref.rollout.agent.agent_loops"
SINGLE_TURN, TOOLS, ENVIRONMENT = NAMES = ("single_turn_agent", "tool_agent", "env_agent")


def several_turns(rollout: RolloutConfig) -> bool:
    """Whether anybody can answer a turn."""
    turns = rollout.multi_turn
    return turns.enable is not False and bool(turns.place or rollout.agent.own or turns.enable)


def who_answers(rollout: RolloutConfig) -> str:
    """The settings that say who answers a turn, for messages."""
    places = [f"{key}={place}" for key, place in rollout.multi_turn.places.items()]
    if agents := rollout.agent.own:
        places.append(f"{AGENT_KEY if rollout.agent.default_agent_loop == agents[0] else LOOPS_KEY}={agents[0]}")
    return " ".join(places) or "actor_rollout_ref.rollout.multi_turn.enable=True"


def needs_rows(cfg: Config) -> bool:
    """Whether workers need the rows of prompts besides their tokens."""
    return cfg.reward_model.classifies or several_turns(cfg.actor_rollout_ref.rollout)
