"""The agent of a row, and the tools that its prompt shows: columns ``agent_name`` and ``extra_info``."""

import re
import sys

import pytest

from rltrain.common.errors import ConfigError, DataError
from rltrain.config.load import load_config
from rltrain.data.chat import ChatEncoder
from rltrain.data.prompts import encode_prompts
from rltrain.data.row_tools import RowTools, row_tools
from rltrain.data.rows import read_rows
from tests.tiny_tools import TOOLS

# The names appear in the prompt, as words that the tokenizer has.
NAMES = ("what", "is", "system")
SCHEMAS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in NAMES]
SHOWING = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"


@pytest.fixture
def encoder(tokenizer_folder):
    """encoder(...): return the encoder of a template that shows the names of tools."""
    own = ChatEncoder(str(tokenizer_folder)).tokenizer.chat_template

    def make(**changes):
        tools = RowTools(**{"schemas": SCHEMAS, "default_agent": "tool_agent"} | changes)
        return ChatEncoder(str(tokenizer_folder), chat_template=SHOWING + own, row_tools=tools)

    return make


@pytest.fixture
def rows(tmp_path, write, good_row):
    """rows((agent_name, extra_info), ...): return the rows of a file."""

    def make(*asked):
        made = [
            good_row(i, agent_name=agent, extra_info={"index": i, **extra}) for i, (agent, extra) in enumerate(asked)
        ]
        return read_rows(write(tmp_path / "rows.parquet", made))

    return make


def shown(encoder, rows):
    """Return the names of the tools in each prompt."""
    store = encode_prompts(rows, encoder, 99)
    texts = encoder.decode_batch([store.prompt(i) for i in range(len(store))], special=True)
    return [text.partition("<|start|>")[0].split() for text in texts]


def test_each_prompt_shows_the_tools_of_its_row(encoder, rows):
    found = rows(
        (None, {}),
        ("tool_agent", {"tool_selection": ["system", "what"]}),
        ("single_turn_agent", {"tool_selection": ["is"]}),
        ("tool_agent", {"tool_selection": []}),
        (None, {"tool_selection": ["is"]}),
        ("single_turn_agent", {}),
    )
    everything = list(NAMES)
    assert shown(encoder(), found) == [everything, ["system", "what"], [], everything, ["is"], []]
    assert shown(encoder(enabled=False), found) == [[]] * 6
    assert shown(encoder(default_agent="single_turn_agent"), found)[0] == []
    assert shown(encoder(has_step=True, default_agent="env_agent"), found)[0] == []
    assert found[1].agent_name == "tool_agent"
    assert found[0].agent_name is None


def test_the_tools_of_a_row_count_towards_the_length_of_its_prompt(encoder, rows):
    found = rows((None, {}), (None, {"tool_selection": ["is"]}), ("single_turn_agent", {}))
    lengths = [len(encoder().encode(row.prompt, tools=encoder().row_tools.of(row))) for row in found]
    assert lengths == [lengths[2] + 3, lengths[2] + 1, lengths[2]]
    store = encode_prompts(found, encoder(), lengths[1], filter_overlong=True)
    assert store.row_index.tolist() == [1, 2]
    assert store.lengths.tolist() == lengths[1:]


GONE = ("{folder}/gone.py:agent",)
AGENT = "open(__file__ + '.ran', 'w')\nasync def agent(chat, row, seed):\n    await chat.reply()\n"


@pytest.mark.parametrize(
    ("asked", "changes", "words"),
    [
        (("tool_agnt", {}), {}, "'tool_agnt', which the configuration does not list: use single_turn_agent,"),
        (("tool_agent", {}), {"schemas": []}, "'tool_agent', and the run has no tools: name them with"),
        (
            ("env_agent", {}),
            {},
            "'env_agent', and actor_rollout_ref.rollout.multi_turn.environment names no class with step",
        ),
        (("{folder}/gone.py:agent", {}), {"own_agents": GONE}, "which cannot be used: "),
        # Code next to the data, or installed code, is not loaded because the data names it.
        (("{folder}/own.py:agent", {}), {}, "agent_name is '{folder}/own.py:agent', which the configuration does not"),
        (("file://{folder}/own.py:agent", {}), {"own_agents": GONE}, "which the configuration does not list"),
        (("antigravity:agent", {}), {"own_agents": GONE}, "'antigravity:agent', which the configuration does not"),
        ((None, {"tool_selection": ["is", "no"]}), {}, "tool_selection has 'no'; the tools of the run are what, is"),
        ((None, {"need_tools_kwargs": True}), {}, "need_tools_kwargs is true, and it has no extra_info.tools_kwargs"),
    ],
)
def test_row_requirements_that_the_run_lacks_are_errors(encoder, rows, tmp_path, asked, changes, words):
    (tmp_path / "own.py").write_text(AGENT)
    agent, extra = asked
    agent, words = agent and agent.format(folder=tmp_path), words.format(folder=tmp_path)
    changes = changes | {"own_agents": tuple(each.format(folder=tmp_path) for each in changes.get("own_agents", ()))}
    found = rows(("single_turn_agent", {}), (agent, extra))
    with pytest.raises(DataError, match=re.escape(words)) as refusal:
        encode_prompts(found, encoder(**changes), 99)
    assert f"{tmp_path}/rows.parquet' row 1: its " in str(refusal.value)
    assert not (tmp_path / "own.py.ran").exists()
    assert "antigravity" not in sys.modules
    encode_prompts(found, encoder(enabled=False, **changes), 99)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"agent_name": 3}, "field 'agent_name' is int 3; it must be text, such as tool_agent"),
        ({"extra_info": {"tool_selection": "is"}}, "field 'extra_info.tool_selection' is str 'is'; it must be a list"),
        ({"extra_info": {"tools_kwargs": "x"}}, "field 'extra_info.tools_kwargs' is str 'x'; it must be {NAME"),
    ],
)
def test_a_field_of_another_kind_is_refused(tmp_path, write, good_row, changes, words):
    with pytest.raises(DataError, match=re.escape(words)):
        read_rows(write(tmp_path / "rows.parquet", [good_row(**changes)]))


def test_the_tools_of_a_run_decide_who_leads_by_default(tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "guess.py").write_text("class Guess:\n    def step(self, text): return '', 0.0, True\n")
    key = "actor_rollout_ref.rollout.multi_turn."

    def of(*settings):
        found = row_tools(load_config(list(settings)).config.actor_rollout_ref.rollout)
        return [schema["function"]["name"] for schema in found.schemas], found.default_agent, found.enabled

    tools, guess = f"{key}function_tool_path={tmp_path}/tools.py", f"{key}environment={tmp_path}/guess.py:Guess"
    assert of() == ([], "single_turn_agent", True)
    assert of(tools) == (["add"], "tool_agent", True)
    assert of(guess) == ([], "env_agent", True)
    assert of(tools, guess) == (["add"], "tool_agent", True)
    assert of(tools, guess, "actor_rollout_ref.rollout.agent.default_agent_loop=env_agent")[1] == "env_agent"
    assert of(tools, f"{key}enable=False") == ([], "single_turn_agent", False)
    with pytest.raises(ConfigError, match=r"gone.py is not a Python file"):
        of(f"{key}function_tool_path={tmp_path}/gone.py")


def test_a_row_whose_trajectories_score_themselves_needs_no_scorer(rows):
    plain, single, own = rows((None, {}), ("single_turn_agent", {}), ("mine.py:agent", {}))
    tools = RowTools(SCHEMAS, default_agent="tool_agent", own_agents=("mine.py:agent",))
    assert [tools.scores_itself(row) for row in (plain, single, own)] == [False, False, True]
    scoring = RowTools(SCHEMAS, default_agent="tool_agent", scores=True, own_agents=("mine.py:agent",))
    assert [scoring.scores_itself(row) for row in (plain, single, own)] == [True, False, True]
