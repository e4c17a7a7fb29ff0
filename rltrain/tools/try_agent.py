"""Try tools, an environment or an agent on a row of a data file, in this process: prints are shown, breakpoint() works.

    rltrain agents try tools.py train.parquet --turns turns.txt     # or a module, or verl's YAML file
    rltrain agents try shop.py:Shop train.parquet                   # a class; turns are typed
    rltrain agents try agent.py:agent train.parquet --model MODEL   # formatted by the model's chat template

A turn is the policy's text with its tool calls; a line --- ends it. Other settings are keys of a run:
actor_rollout_ref.rollout.multi_turn.environment_kwargs='{most: 3}'. rltrain evaluate with these settings lets a model
generate the turns. Exit code 0: the trajectory ended; 2: it failed, or nothing could be tried.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rltrain.agents import verl_stubs
from rltrain.agents.chat import Chat, NewMessages, ToolCall, TrajectoryStart, Turn, TurnLimits
from rltrain.agents.configured import TOOL_CONFIG
from rltrain.agents.content import as_text
from rltrain.agents.endpoint import Endpoint
from rltrain.agents.environments import ENVIRONMENT
from rltrain.agents.functions import FUNCTIONS
from rltrain.agents.loop import run_trajectory
from rltrain.agents.toolbox import Session, Toolbox, toolbox_of
from rltrain.common.errors import DataError, RltrainError, command, sanitize
from rltrain.common.plugin import is_plugin, load_plugin, user_traceback
from rltrain.config.agents import AGENT_KEY, SINGLE_TURN
from rltrain.config.load import load_config
from rltrain.config.schema import Config
from rltrain.data.chat import ChatEncoder, chat_encoder
from rltrain.data.rows import PromptRow, keys_of, read_rows
from rltrain.data.turns.calls import Call, Parsed
from rltrain.data.turns.detect import format_of
from rltrain.data.turns.formats.families import NO_CALLS
from rltrain.data.turns.turn_delta import TurnDelta

_END = "---"
# The limits are long, because a user may stay in breakpoint().
_PATIENCE_S = 86400.0


class Trial:
    """One trajectory in this process, printed as it runs."""

    def __init__(self, options: argparse.Namespace, cfg: Config, encoder: ChatEncoder, row: PromptRow) -> None:
        self._turns, self._encoder = cfg.actor_rollout_ref.rollout.multi_turn, encoder
        self._schemas, agent = encoder.row_tools.of(row), encoder.row_tools.agent_of(row)
        # Without a model there is no template to define the format of calls.
        guessed = self._turns.format == "auto" and encoder.tools and not options.model
        call_format = format_of("hermes" if guessed else self._turns.format, encoder)
        self._turn_delta = TurnDelta(encoder, encoder.tools, call_format) if options.model else None
        self._format = call_format if self._schemas else NO_CALLS
        self._lines, self._is_typed = _lines(options.turns), not options.turns and sys.stdin.isatty()
        self._num_turns, self._parsed = 0, Parsed([], [], "", "")  # the last turn
        content = {"data_source": row.data_source, "ground_truth": row.ground_truth, "extra_info": row.extra_info}
        names = tuple(schema["function"]["name"] for schema in self._schemas)
        self._start = TrajectoryStart(row.prompt, content, options.seed, agent if is_plugin(agent) else None, names)
        # Without a model, images are shown as <image>. The template of --model formats texts only.
        terms = TurnLimits.of(self._turns, images=self._turns.images is not False and self._turn_delta is None)
        self._terms = replace(terms, timeout_s=_PATIENCE_S, trajectory_timeout_s=None)

    def show_prompt(self, origin: str) -> None:
        """Print the tools and the prompt. origin: file and number of the row."""
        for schema in self._schemas:
            _print(json.dumps(schema, ensure_ascii=False, indent=1))
        _print(f"calls are written as {self._format.name}" if self._schemas else "the prompt shows no tools")
        prompt = self._start.prompt
        text = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
        _print(self._encoder.render(prompt, tools=self._schemas) if self._turn_delta else text, f"prompt, {origin}")

    async def run(self, toolbox: Toolbox) -> bool:
        """Run the trajectory. Return True if it ended without an error."""
        session: Session | None = None
        endpoint = Endpoint(asyncio.get_running_loop())
        try:
            session = await toolbox.open(self._start.row, self._start.seed)
            session.names = [name for name in session.names if name in self._start.tools]
            if (first := self._next_turn()) is None:
                _print("There is no turn.")
                return False
            terms, prompt = self._terms, self._start.prompt
            chat = self._chat = Chat(prompt, ([first], [], []), terms, session, self._reply, endpoint.address)
            outcome = await run_trajectory(chat, session, self._start, terms)
            self._show(chat.take_new())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: its error is shown
            text = str(error) if isinstance(error, RltrainError) else user_traceback(error)
            _print(text, "failed: the trajectory was ended by an error")
            return False
        finally:
            endpoint.shut()
            if session:
                await session.close()
        score = outcome.pop("score", None)
        _print(f"rewards: {chat.rewards}", f"the end, after {self._num_turns} turns")
        _print(f"score: {'none; the scorer of the run scores the response' if score is None else f'{score:g}'}")
        if outcome:
            _print("further: " + " ".join(f"{name}={value:g}" for name, value in outcome.items()))
        return True

    def _next_turn(self) -> Turn | None:
        """Return the next turn of the file or the terminal, and print it. None at the end of the input."""
        if self._is_typed:
            _print(f"[type a turn and a line {_END} after it; the end of the input ends the trajectory]")
        lines = list[str]()
        for line in self._lines:
            if line.strip() == _END:
                break
            lines.append(line)
        else:
            if not "".join(lines).strip():
                return None
        text = "".join(lines).strip("\n")
        self._num_turns += 1
        _print(text, f"turn {self._num_turns}, of the policy")
        parsed = self._parsed = self._format.parse(text, self._schemas)
        for call in parsed.calls:
            _print(f"  call: {call.name} {json.dumps(call.arguments, ensure_ascii=False, default=str)}")
        for problem in parsed.problems:
            _print(f"  unreadable call: {problem}")
        most = self._turns.max_assistant_turns
        is_last = most is not None and self._num_turns >= most
        if is_last:
            _print(f"  the last turn by multi_turn.max_assistant_turns={most}: its calls are not run")
        calls = [ToolCall(call.name, call.arguments) for call in parsed.calls]
        return Turn(parsed.text, calls, parsed.problems, parsed.reasoning, "turns" if is_last else "stop")

    def _reply(self, request: NewMessages) -> None:
        """Print the messages since the last turn, also in the model's template, and reply with the next turn."""
        self._show(request)
        if self._turn_delta:
            answered = any(message["role"] == "tool" for message in request.messages)
            calls = [*self._parsed.calls, *(Call("unreadable", {}) for _ in self._parsed.problems)] if answered else []
            tokens = self._turn_delta.context(None, calls, request.messages)
            text = repr(self._encoder.decode_batch([tokens], special=True)[0])
            _print(text, "text between the turns, by the chat template")
        self._chat.deliver(self._next_turn())

    def _show(self, request: NewMessages) -> None:
        for message in request.messages:
            parts = [message["role"], message.get("name", ""), message.get("arguments", "")]
            if (seconds := message.get("seconds")) is not None:
                limit = self._turns.tool_timeout_s
                late = f"; a run waits {limit:g} s (multi_turn.tool_timeout_s)" if seconds > limit else ""
                parts.append(f"({seconds:.3g} s{late})")
            _print(as_text(message["content"]), " ".join(filter(None, parts)))
        if any(request.rewards):
            _print(f"  rewards: {request.rewards}")


@command
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(argv)
    settings: dict[str, Any] = {_key_of(options.file): options.file, "data.train_files": options.data}
    settings |= {"actor_rollout_ref.model.path": options.model} if options.model else {}
    cfg = load_config(options.settings, [settings]).config
    toolbox, encoder = toolbox_of(cfg.actor_rollout_ref.rollout.multi_turn), chat_encoder(cfg)
    rows = read_rows(options.data, keys=keys_of(cfg.data))
    if not 0 <= options.row < len(rows):
        raise DataError(f"--row {options.row}: {rows.paths} has rows 0 to {len(rows) - 1}.")
    row = rows[options.row]
    problem = encoder.row_tools.problem(row)
    if encoder.row_tools.agent_of(row) == SINGLE_TURN:
        problem = f"its agent is {SINGLE_TURN}, which has one turn, so there is nothing to try."
    if problem:
        raise DataError(f"{rows.origin(options.row)}: {problem}")
    trial = Trial(options, cfg, encoder, row)
    trial.show_prompt(rows.origin(options.row))
    return 0 if asyncio.run(trial.run(toolbox)) else 2


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "rltrain agents try", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="tools (FILE.py, package.module, FILE.yaml), or FILE.py:NAME of a class or agent")
    parser.add_argument("data", help="a file with rows of the run")
    parser.add_argument("settings", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="number of the row, from 0 (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of reset and agents (%(default)s)")
    turns = f"the turns of the policy, with a line {_END} after each (default: typed by you)"
    parser.add_argument("--turns", type=Path, metavar="FILE", help=turns)
    parser.add_argument("--model", metavar="PATH", help="a model's folder, whose chat template formats the messages")
    return parser.parse_intermixed_args(argv)


def _key_of(place: str) -> str:
    """Return the setting of a run that names the tools, environment or agent."""
    if place.endswith((".yaml", ".yml")):
        return TOOL_CONFIG
    if not is_plugin(place):
        return FUNCTIONS
    # Guess the key for the error message, in case the name does not exist. Class names are capitalised.
    key = ENVIRONMENT if place.rpartition(":")[2][:1].isupper() else AGENT_KEY
    with verl_stubs.importable():
        return ENVIRONMENT if inspect.isclass(load_plugin(key, place)) else AGENT_KEY


def _lines(file: Path | None) -> Iterator[str]:
    if file is None:
        return iter(sys.stdin.readline, "")
    try:
        return iter(file.read_text(encoding="utf-8").splitlines(keepends=True))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--turns {file} cannot be read: {error}") from error


def _print(text: str, head: str = "") -> None:
    sys.stdout.write(f"── {sanitize(head)} ──\n{sanitize(text)}\n" if head else f"{sanitize(text)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
