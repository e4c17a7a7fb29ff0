"""Try tools, an environment or an agent on a row of a data file, in this process: prints are shown, breakpoint() works.

    rltrain agents try tools.py train.parquet --turns turns.txt     # or a module, or verl's YAML file
    rltrain agents try shop.py:Shop train.parquet                   # a class: turns are typed
    rltrain agents try agent.py:agent train.parquet --model MODEL   # a model generates, greedily

A turn is the policy's text with its tool calls; a line --- ends it. With --model, its chat template formats prompt and
tool results. Other settings are those of a run: actor_rollout_ref.rollout.multi_turn.environment_kwargs='{most: 3}'.
Exit code 0: the trajectory ended; 2: it failed, or nothing could be tried.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rltrain.agents import stand_ins
from rltrain.agents.chat import Asked, Chat, Start, Terms, ToolCall, Turn
from rltrain.agents.configured import TOOL_CONFIG
from rltrain.agents.content import as_text
from rltrain.agents.endpoint import Endpoint
from rltrain.agents.environments import ENVIRONMENT
from rltrain.agents.functions import FUNCTIONS
from rltrain.agents.loop import lead
from rltrain.agents.toolbox import Session, Toolbox, toolbox_of
from rltrain.common.device import get_device, resolve_dtype
from rltrain.common.errors import DataError, RltrainError, command, sanitize
from rltrain.common.plugin import is_plugin, load_plugin, user_traceback
from rltrain.config.agents import AGENT_KEY, SINGLE_TURN
from rltrain.config.load import load_config
from rltrain.config.schema import Config
from rltrain.data.chat import ChatEncoder, chat_encoder
from rltrain.data.rows import Rows, keys_of, read_rows
from rltrain.data.turns.calls import Call, Parsed
from rltrain.data.turns.detect import format_of
from rltrain.data.turns.formats.families import NO_CALLS
from rltrain.data.turns.seam import Seam

_END = "---"
# Long, because a user may spend any time in breakpoint().
_PATIENCE_S = 86400.0


@dataclass(frozen=True)
class Said:
    """A turn of the policy."""

    text: str
    """Text with special tokens."""
    ended: bool = True
    """True if the turn ended by itself, not at the length limit."""
    end_token: int | None = None
    """The token that ended it, if known."""


Policy = Callable[[list[int]], Said | None]
"""Returns the next turn, or None. Its argument: the token ids since the last turn, empty without a model."""


def written(lines: Iterator[str], *, ask: bool) -> Policy:
    """Return a policy whose turns are read from a file, or are typed (``ask``)."""

    def next_turn(_: list[int]) -> Said | None:
        if ask:
            _say(f"[the next turn, and a line {_END} after it; the end of the input: there is none]")
        said = list[str]()
        for line in lines:
            if line.strip() == _END:
                break
            said.append(line)
        else:
            if not "".join(said).strip():
                return None
        return Said("".join(said).strip("\n"))

    return next_turn


def greedy(cfg: Config, encoder: ChatEncoder, prompt: list[int], stops: list[int]) -> Policy:
    """Return the policy of the run's model, on the CPU. prompt: token ids. stops: tokens that end a turn."""
    import torch

    from rltrain.models.load import load_config as config_of
    from rltrain.models.load import read_weights

    of, dtype = cfg.actor_rollout_ref.model, resolve_dtype("float32", get_device("cpu"))
    config = config_of(of.path, trust_remote_code=of.trust_remote_code, override=of.override_config)
    model: Any = read_weights(of.path, config, dtype, trust_remote_code=of.trust_remote_code).eval()
    ids, most = list(prompt), len(prompt) + cfg.data.max_response_length

    def next_turn(context: list[int]) -> Said | None:
        ids.extend(context)
        start = len(ids)
        if start >= most:
            return None
        asked = torch.tensor([ids])
        limits = {"max_new_tokens": most - start, "eos_token_id": stops, "pad_token_id": stops[0]}
        whole = model.generate(asked, attention_mask=torch.ones_like(asked), do_sample=False, **limits)
        ids[:] = whole[0].tolist()
        end = ids[-1] if ids[-1] in stops else None
        return Said(encoder.decode_batch([ids[start:]], special=True)[0], end is not None, end)

    return next_turn


class Trial:
    """One trajectory in this process, printed as it runs."""

    def __init__(self, options: argparse.Namespace, cfg: Config, encoder: ChatEncoder, rows: Rows) -> None:
        row = rows[options.row]
        self._turns, self._encoder = cfg.actor_rollout_ref.rollout.multi_turn, encoder
        self._schemas, agent = encoder.row_tools.of(row), encoder.row_tools.agent_of(row)
        # Without a model no template defines the format of calls.
        guessed = self._turns.format == "auto" and encoder.tools and not options.model
        call_format = format_of("hermes" if guessed else self._turns.format, encoder)
        seam = self._seam = Seam(encoder, encoder.tools, call_format) if options.model else None
        self._format = call_format if self._schemas else NO_CALLS
        for schema in self._schemas:
            _say(json.dumps(schema, ensure_ascii=False, indent=1))
        _say(f"calls are written as {call_format.name}" if self._schemas else "the prompt shows no tools")
        _head(f"prompt, {rows.origin(options.row)}")
        said = "\n".join(f"{message['role']}: {message['content']}" for message in row.prompt)
        _say(encoder.written(row.prompt, tools=self._schemas) if seam else said)
        if options.turns or seam is None:
            self._policy = written(_lines(options.turns), ask=not options.turns and sys.stdin.isatty())
        else:
            prompt = encoder.encode(row.prompt, tools=self._schemas)
            self._policy = greedy(cfg, encoder, prompt, seam.stop_token_ids)
        content = {"data_source": row.data_source, "ground_truth": row.ground_truth, "extra_info": row.extra_info}
        names = tuple(schema["function"]["name"] for schema in self._schemas)
        self._start = Start(row.prompt, content, options.seed, agent if is_plugin(agent) else None, names)
        # Without a model they are shown as <image>; the model of --model gets tokens only.
        terms = Terms.of(self._turns, images=self._turns.images is not False and seam is None)
        self._terms = replace(terms, timeout_s=_PATIENCE_S, trajectory_timeout_s=None)
        self._num_turns = 0
        self._said, self._parsed = Said(""), Parsed([], [], "", "")  # the last turn

    async def run(self, toolbox: Toolbox) -> bool:
        """Run the trajectory. Return True if it ended without an error."""
        session: Session | None = None
        endpoint = Endpoint(asyncio.get_running_loop())
        try:
            session = await toolbox.open(self._start.row, self._start.seed)
            session.names = [name for name in session.names if name in self._start.tools]
            first = self._next_turn([])
            if first is None:
                _say("There is no turn.")
                return False
            terms, prompt = self._terms, self._start.prompt
            chat = self._chat = Chat(prompt, ([first], [], []), terms, session, self._ask, endpoint.address)
            outcome = await lead(chat, session, self._start, terms)
            self._show(chat.last_words())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: its error is shown
            _head("failed: the trajectory could not go on")
            _say(str(error) if isinstance(error, RltrainError) else user_traceback(error))
            return False
        finally:
            endpoint.shut()
            if session:
                await session.close()
        _head(f"the end, after {self._num_turns} turns")
        _say(f"rewards: {chat.rewards}")
        score = outcome.pop("score", None)
        none = "none of its own: a scorer of the run judges the answer (python -m rltrain.rewards.try)"
        _say(f"score: {none if score is None else f'{score:g}'}")
        if outcome:
            _say("further: " + " ".join(f"{name}={value:g}" for name, value in outcome.items()))
        return True

    def _next_turn(self, context: list[int]) -> Turn | None:
        said = self._policy(context)
        if said is None:
            return None
        self._num_turns += 1
        _head(f"turn {self._num_turns}, of the policy")
        _say(said.text)
        parsed, most = self._format.parse(said.text, self._schemas), self._turns.max_assistant_turns
        finish: Any = "stop"
        if not said.ended:  # half a call is ignored
            _say("  cut off: the answer has as many tokens as data.max_response_length allows")
            parsed, finish = replace(parsed, calls=[], problems=[]), "length"
        elif most is not None and self._num_turns >= most:
            finish = "turns"
        for call in parsed.calls:
            _say(f"  call: {call.name} {json.dumps(call.arguments, ensure_ascii=False, default=str)}")
        for problem in parsed.problems:
            _say(f"  a call that cannot be read: {problem}")
        if finish == "turns":
            _say(f"  the last of multi_turn.max_assistant_turns={most}: calls are not run behind it")
        self._said, self._parsed = said, parsed
        calls = [ToolCall(call.name, call.arguments) for call in parsed.calls]
        return Turn(parsed.text, calls, parsed.problems, parsed.reasoning, finish)

    def _ask(self, asked: Asked) -> None:
        """Show the messages since the last turn, also in the format of the model's template, and reply with the next
        turn."""
        self._show(asked)
        context = list[int]()
        if self._seam:
            answered = any(message["role"] == "tool" for message in asked.messages)
            calls = [*self._parsed.calls, *(Call("unreadable", {}) for _ in self._parsed.problems)] if answered else []
            context = self._seam.context(self._said.end_token, calls, asked.messages)
            _head("seam, as the policy reads it")
            _say(repr(self._encoder.decode_batch([context], special=True)[0]))
        self._chat.answered(self._next_turn(context))

    def _show(self, asked: Asked) -> None:
        for message in asked.messages:
            parts = [message["role"], message.get("name", ""), message.get("arguments", "")]
            if (seconds := message.get("seconds")) is not None:
                limit = self._turns.tool_timeout_s
                late = f"; a run waits {limit:g} s (multi_turn.tool_timeout_s)" if seconds > limit else ""
                parts.append(f"({seconds:.3g} s{late})")
            _head(" ".join(filter(None, parts)))
            _say(as_text(message["content"]))
        if any(asked.rewards):
            _say(f"  rewards: {asked.rewards}")


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
        raise DataError(f"--row {options.row}: {rows.paths} has the rows 0 to {len(rows) - 1}.")
    row = rows[options.row]
    problem = encoder.row_tools.problem(row)
    if encoder.row_tools.agent_of(row) == SINGLE_TURN:
        problem = f"it is of {SINGLE_TURN}: nobody answers a turn."
    if problem:
        raise DataError(f"{rows.origin(options.row)}: {problem}")
    return 0 if asyncio.run(Trial(options, cfg, encoder, rows).run(toolbox)) else 2


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "rltrain agents try", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="tools (FILE.py, package.module, FILE.yaml), or FILE.py:NAME of a class or agent")
    parser.add_argument("data", help="a file with rows of the run")
    parser.add_argument("settings", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="the row to try, from 0 (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which reset and agents get (%(default)s)")
    turns = f"what the policy says, a line {_END} behind each turn; without it the model says it, or you type it"
    parser.add_argument("--turns", type=Path, metavar="FILE", help=turns)
    model = "a model's folder: its template writes prompt and seams, and without --turns it answers"
    parser.add_argument("--model", metavar="PATH", help=model)
    return parser.parse_intermixed_args(argv)


def _key_of(place: str) -> str:
    """Return the setting of a run that names the tools, environment or agent."""
    if place.endswith((".yaml", ".yml")):
        return TOOL_CONFIG
    if not is_plugin(place):
        return FUNCTIONS
    # For the error message if the name does not exist: classes begin with a capital.
    key = ENVIRONMENT if place.rpartition(":")[2][:1].isupper() else AGENT_KEY
    with stand_ins.importable():
        return ENVIRONMENT if inspect.isclass(load_plugin(key, place)) else AGENT_KEY


def _lines(file: Path | None) -> Iterator[str]:
    if file is None:
        return iter(sys.stdin.readline, "")
    try:
        return iter(file.read_text(encoding="utf-8").splitlines(keepends=True))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--turns {file} cannot be read: {error}") from error


def _head(text: str) -> None:
    _say(f"── {text} ──")


def _say(text: str) -> None:
    sys.stdout.write(f"{sanitize(text)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
