"""``python -m rltrain.agents.try`` runs a trajectory in this process, turn by turn."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.config.agents import AGENT_KEY
from rltrain.tools.try_agent import main
from tests.tiny import write_arithmetic
from tests.tiny_tools import CALL, TOOLS, save_calling_model

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn."
MORE = '''

def nap(seconds: float):
    """Sleep.

    Args:
        seconds: How long.
    """
    import threading
    threading.Event().wait(seconds)
    return "awake \x1b[2J", 0.5


def fail() -> str:
    """Raise."""
    raise ValueError("no such city")
'''
COUNT = '''
class Count:
    """Says how many turns there were."""

    def __init__(self, most=2):
        self.turns, self.most = 0, most

    def reset(self, row, seed):
        self.name = f"{row['data_source']} {seed}"

    def step(self, text):
        self.turns += 1
        return f"{self.turns} of {self.name}: {text}", 0.25, self.turns == self.most
'''
AGENT = """
async def agent(chat, row, seed):
    turn = await chat.reply()
    chat.add("user", f"not {turn.text}?")
    turn = await chat.reply()
    await chat.answer_calls(turn)
    assert all(message.keys() <= {"role", "content", "name", "tool_calls"} for message in chat.messages)
    return {"score": float(turn.text == row["ground_truth"]), "seed": seed, "tools": len(chat.tools)}

async def broken(chat, row, seed):
    await chat.reply()
    raise RuntimeError("no server")
"""


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files to try and four rows of arithmetic, in the current folder."""
    for name, code in (("tools", TOOLS + MORE), ("count", COUNT), ("agent", AGENT)):
        (tmp_path / f"{name}.py").write_text(code)
    write_arithmetic(tmp_path / "rows.parquet", range(4))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def attempt(folder, capsys, monkeypatch):
    """attempt(file, arguments…, turns=[…] or typed="…"): return the exit code and the output."""

    def run(file, *more, turns=None, typed=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        if turns is not None:
            (folder / "turns.txt").write_text("\n---\n".join(turns))
            more = (*more, "--turns", "turns.txt")
        code = main([file, "rows.parquet", *map(str, more)])
        written = capsys.readouterr()
        return code, written.out + written.err

    return run


def test_tools_are_run_as_turns_call_them(attempt):
    turns = [f"I add.\n{call('add', a=2, b=3)}", call("nap", seconds=0.05), call("fail"), "<tool_call>\n{", "5"]
    code, text = attempt("tools.py", f"{MULTI_TURN}tool_timeout_s=0.01", turns=turns)
    assert code == 0
    order = [
        '"name": "add"', '"name": "fail"', "calls are written as hermes", "user: 0+0=?",
        "turn 1, of the policy", "I add.", 'call: add {"a": 2, "b": 3}', '── tool add {"a": 2, "b": 3} (', "\n5\n",
        "turn 2", "s; a run waits 0.01 s (multi_turn.tool_timeout_s)) ──", "awake \ufffd[2J", "rewards: [0.5]",
        "turn 3", 'raise ValueError("no such city")', "── tool fail {} (", "Error: ValueError: no such city",
        "turn 4", "unreadable call: ", "── tool unreadable ──", "turn 5", "the end, after 5 turns",
        "score: none; the scorer of the run scores the response",
    ]  # fmt: skip
    place = 0
    for words in order:
        place = text.find(words, place)
        assert place >= 0, words


def test_turns_of_an_environment_may_be_typed(attempt):
    most = f"{MULTI_TURN}environment_kwargs={{most: 3}}"
    code, text = attempt("count.py:Count", "--row", 1, "--seed", 7, most, typed="a\n---\nb\nc\n---\nd")
    assert code == 0
    assert "1 of rltrain/arithmetic 7: a\n" in text
    assert "2 of rltrain/arithmetic 7: b\nc\n" in text
    assert text.endswith("the end, after 3 turns ──\nrewards: [0.25, 0.25, 0.25]\nscore: 0.75\n")
    # The end of the input ends the trajectory, as in a run without room for a further turn.
    code, text = attempt("count.py:Count", typed="a\n")
    assert code == 0
    assert text.endswith("the end, after 1 turns ──\nrewards: [0.25]\nscore: 0.25\n")
    assert attempt("count.py:Count")[0] == 2


def test_agent_runs_its_trajectory(attempt):
    with_tools = f"{MULTI_TURN}function_tool_path=tools.py"
    code, text = attempt("agent.py:agent", with_tools, "--seed", 3, turns=["4", f"0{call('add', a=1, b=1)}"])
    assert code == 0
    assert "── user ──\nnot 4?\n" in text
    assert '── tool add {"a": 1, "b": 1} (' in text, "also of results that no turn follows"
    assert text.endswith("score: 1\nfurther: seed=3 tools=3\n")
    code, text = attempt("agent.py:broken", turns=["4"])
    assert code == 2
    assert "failed: the trajectory was ended by an error" in text
    assert 'agent.py", line 12, in broken' in text
    assert "RuntimeError: no server" in text
    assert "rltrain/tools" not in text, "the frames are the user's own"


@pytest.mark.parametrize(
    ("file", "more", "words"),
    [
        ("count.py:None_", [], "multi_turn.environment=count.py:None_: the file has no function 'None_'"),
        ("none.yaml", [], "multi_turn.tool_config_path=none.yaml cannot be read"),
        ("tools.py", ["--row", 4], "--row 4: rows.parquet has rows 0 to 3."),
        ("tools.py", [f"{MULTI_TURN}format=klingon"], "multi_turn.format=klingon: no format has this name"),
        ("tools.py", [f"{AGENT_KEY}=env_agent"], "is 'env_agent', and "),
        ("tools.py", [f"{MULTI_TURN}max_trns=3"], "multi_turn.max_trns=3: no version of verl has this key"),
    ],
)  # fmt: skip
def test_try_agent_rejects_like_a_run(attempt, file, more, words):
    code, text = attempt(file, *more)
    assert code == 2
    assert words in text
    assert "Traceback" not in text


def test_the_template_of_a_model_formats_prompt_and_tool_results(attempt, folder):
    last = f"{MULTI_TURN}max_assistant_turns=2"
    code, text = attempt("tools.py", "--model", save_calling_model(folder / "model"), last, turns=[CALL, "5"])
    assert code == 0
    assert "<|im_start|>user\n0+0=?<|im_end|>\n<|im_start|>assistant\n" in text
    assert f"turn 1, of the policy ──\n{CALL}\n" in text
    between = "<|im_end|>\n<|im_start|>user<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert f"── text between the turns, by the chat template ──\n{between!r}\n" in text
    assert "the last turn by multi_turn.max_assistant_turns=2: its calls are not run" in text


def test_breakpoint_reaches_the_terminal(folder):
    (folder / "tools.py").write_text(TOOLS.replace("    return", "    breakpoint()\n    return"))
    (folder / "turns.txt").write_text(CALL)
    command = [sys.executable, "-m", "rltrain.agents.try", "tools.py", "rows.parquet", "--turns", "turns.txt"]
    looked = "p a * 1000 + b\nc\n"
    done = subprocess.run(command, input=looked, capture_output=True, text=True, timeout=120, cwd=folder,
                          env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "(Pdb) 2003" in done.stdout
    assert "\n5\n── the end, after 1 turns ──" in done.stdout
