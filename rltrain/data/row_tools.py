"""Agent and tools of each row: columns ``agent_name`` and ``extra_info``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from rltrain.agents.toolbox import toolbox_of
from rltrain.common.errors import ConfigError, DataError
from rltrain.common.plugin import load_plugin
from rltrain.config.agents import AGENT_KEY, ENVIRONMENT, LOOPS_KEY, SINGLE_TURN, TOOLS, several_turns, who_answers
from rltrain.config.schema.rollout import RolloutConfig

if TYPE_CHECKING:
    from rltrain.data.rows import PromptRow, Rows

_PLACES = "actor_rollout_ref.rollout.multi_turn.function_tool_path, tool_config_path or environment"


@dataclass(frozen=True)
class RowTools:
    """Tools of a run, and their selection per row."""

    schemas: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of all tools, as chat templates show them."""
    has_step: bool = False
    """True if the run has an environment that replies to whole turns."""
    default_agent: str = SINGLE_TURN
    """Agent of rows without ``agent_name``."""
    enabled: bool = True
    """False: every row has one turn, whatever its agent."""
    scores: bool = False
    """True if the run's class scores trajectories."""
    own_agents: tuple[str, ...] = ()
    """Agents that the configuration lists. A row can only select one of these; its text is never loaded as code."""
    several_turns: bool = True
    """True if the run has anything that can reply to a turn."""

    def agent_of(self, row: PromptRow) -> str:
        """Return ``single_turn_agent``, ``tool_agent``, ``env_agent`` or FILE.py:NAME."""
        return (row.agent_name or self.default_agent) if self.enabled else SINGLE_TURN

    def of(self, row: PromptRow) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools that the row's prompt shows and that may be called.

        Empty for single-turn and environment rows. If the row has a non-empty ``extra_info.tool_selection``, only its
        tools are returned, in its order.
        """
        if self.agent_of(row) in (SINGLE_TURN, ENVIRONMENT):
            return []
        by_name = {schema["function"]["name"]: schema for schema in self.schemas}
        return [by_name[name] for name in row.extra_info.get("tool_selection") or by_name if name in by_name]

    def scores_itself(self, row: PromptRow) -> bool:
        """Return whether a trajectory of the row may score itself, so that no scorer needs to support the row."""
        agent = self.agent_of(row)
        return agent in self.own_agents or (agent != SINGLE_TURN and self.scores)

    def groups(self, rows: Sequence[PromptRow]) -> Iterator[tuple[list[dict[str, Any]], list[int]]]:
        """Group row indices by equal tools. Yields schemas and indices."""
        groups: dict[tuple[str, ...], tuple[list[dict[str, Any]], list[int]]] = {}
        for number, row in enumerate(rows):
            schemas = self.of(row)
            names = tuple(schema["function"]["name"] for schema in schemas)
            groups.setdefault(names, (schemas, []))[1].append(number)
        yield from groups.values()

    def problem(self, row: PromptRow) -> str | None:
        """Return a requirement of the row that the run does not meet, or None."""
        agent = self.agent_of(row)
        if problem := self._problem_of_agent(agent):
            source = "its agent_name" if row.agent_name else "actor_rollout_ref.rollout.agent.default_agent_loop"
            return f"{source} is {agent!r}, {problem}"
        if agent in (SINGLE_TURN, ENVIRONMENT) or not self.schemas:
            return None
        names = [schema["function"]["name"] for schema in self.schemas]
        for name in row.extra_info.get("tool_selection") or ():
            if name not in names:
                return f"its extra_info.tool_selection has {name!r}; the tools of the run are {', '.join(names)}."
        if row.extra_info.get("need_tools_kwargs") and not row.extra_info.get("tools_kwargs"):
            return "its extra_info.need_tools_kwargs is true, and it has no extra_info.tools_kwargs."
        return None

    def _problem_of_agent(self, agent: str) -> str | None:
        if agent == SINGLE_TURN:
            return None
        if agent == TOOLS:
            return None if self.schemas else f"and the run has no tools: name them with {_PLACES}."
        if agent == ENVIRONMENT:
            missing = "and actor_rollout_ref.rollout.multi_turn.environment names no class with step."
            return None if self.has_step else missing
        if agent not in self.own_agents:
            return (
                f"which the configuration does not list: use {SINGLE_TURN}, {TOOLS}, {ENVIRONMENT}, or list the "
                f"FILE.py:NAME of your own in {LOOPS_KEY}, exactly as in the data."
            )
        if not self.several_turns:
            return "but responses have a single turn: set actor_rollout_ref.rollout.multi_turn.enable=True."
        try:
            load_plugin(LOOPS_KEY, agent)
        except ConfigError as error:
            return f"which cannot be used: {error}"
        return None


def row_tools(rollout: RolloutConfig) -> RowTools:
    """Return the tools of a run. Raises ConfigError if they cannot be loaded."""
    toolbox = toolbox_of(rollout.multi_turn)
    # If a run has both tools and an environment, turns without tool calls go to the environment.
    usual = TOOLS if toolbox.schemas else ENVIRONMENT if toolbox.has_step else SINGLE_TURN
    return RowTools(
        toolbox.schemas,
        toolbox.has_step,
        rollout.agent.default_agent_loop or usual,
        rollout.multi_turn.enable is not False,
        scores=toolbox.scores,
        own_agents=rollout.agent.own,
        several_turns=several_turns(rollout),
    )


def check_agents(rollout: RolloutConfig, tools: RowTools, splits: Mapping[str, Rows]) -> None:
    """Raise DataError if the run can reply to turns, but no row has a multi-turn agent."""
    all_rows = chain.from_iterable(splits.values())
    if not several_turns(rollout) or any(tools.agent_of(row) != SINGLE_TURN for row in all_rows):
        return
    paths = ", ".join(rows.paths for rows in splits.values())
    raise DataError(
        f"{who_answers(rollout)}: no row of {paths} gets replies, because the agent of each is {SINGLE_TURN}. Write "
        f"{TOOLS}, {ENVIRONMENT} or an entry of {LOOPS_KEY} into its column agent_name, or set {AGENT_KEY}."
    )
