"""Display of a run's responses on the terminal."""

import json

import pandas as pd
import pytest

from rltrain.common.errors import DataError
from rltrain.run.report.samples import read_samples, shorten
from rltrain.tools.view import main


def frame(step: int, scores: list[float], **columns) -> pd.DataFrame:
    """Return two responses to each of the prompts 0, 1, …"""
    n = len(scores)
    rows = [place // 2 for place in range(n)]
    return pd.DataFrame(
        {
            "step": step, "row": rows, "sample": [place % 2 for place in range(n)],
            "data_source": ["one" if row < 2 else "two" for row in rows], "index": [str(row) for row in rows],
            "question": [f"{row}+{row}=?" for row in rows], "prompt": [f"<user>{row}+{row}=?" for row in rows],
            "answer": [f"s{step} says {place}" for place in range(n)], "ground_truth": [str(2 * row) for row in rows],
            "score": scores, "reward": scores, "reward_failed": 0.0, "response_length": range(n),
            "finish_reason": "stop", **columns,
        }
    )  # fmt: skip


@pytest.fixture
def run(tmp_path):
    (tmp_path / "samples").mkdir()
    for step, scores in ((1, [0.0] * 6), (7, [0, 0, 1, 0, 1, 1.0])):
        for split in ("train", "val"):
            frame(step, scores).to_parquet(tmp_path / "samples" / f"{split}_{step:06d}.parquet")
    return tmp_path


def shown(capsys, *arguments) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_the_newest_step_is_shown_plainly_where_it_is_piped(run, capsys):
    text = shown(capsys, run)
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("answer: ")] == ["0", "2", "4", "1", "3"]
    assert "\x1b" not in text
    assert text.count("answer: s7 says") == 5
    assert "prompt: <user>0+0=?" in text
    assert text.endswith("5 of 6 responses, step 7\n")
    assert "s1 says" in shown(capsys, run, "--step", 1)


@pytest.mark.parametrize(
    ("order", "first"), [("--worst", [0, 3]), ("--best", [2, 4]), ("--longest", [5, 3]), ("--mixed", [2, 3])]
)
def test_view_sorts_and_shows_one_response_of_each_prompt_first(run, capsys, order, first):
    text = shown(capsys, run, order, "-n", 2, "--lines")
    assert [line.split(" -> ")[1].split()[2] for line in text.splitlines()[:2]] == [str(each) for each in first]


def test_answers_that_could_not_be_scored_are_found(run, capsys):
    failed = frame(8, [0.0, 0, 1, 1], reward_failed=[0.0, 1, 0, 0], reward_error=["", "Traceback: boom", "", ""])
    failed.to_parquet(run / "samples" / "train_000008.parquet")
    text = shown(capsys, run, "--failed")
    assert "reward_error: Traceback: boom" in text
    assert text.endswith("1 of 1 responses, step 8\n")


def test_answers_before_and_after_stand_below_each_other(run, capsys):
    text = shown(capsys, run, "--compare", "-n", 2)
    assert text.splitlines() == [
        "0+0=?", "  step     1 -> s1 says 0 ✗ (0)", "  step     7 -> s7 says 0 ✗ (0)",
        "1+1=?", "  step     1 -> s1 says 2 ✗ (2)", "  step     7 -> s7 says 2 ✓",
        "right, of all saved ones: step 1: 0.0%, step 7: 50.0%",
    ]  # fmt: skip
    assert shown(capsys, run, "--compare", 1, 7, "-n", 2) == text
    assert shown(capsys, run, "--compare", 7, "-n", 2) == text


def test_long_answers_lose_their_middle(run, capsys):
    frame(9, [1.0, 1.0], answer="start " + "x" * 5000 + " end").to_parquet(run / "samples" / "train_000009.parquet")
    text = shown(capsys, run, "-n", 1, "--chars", 100)
    assert "start xxx" in text
    assert "x end" in text
    assert "4,910 characters left out" in text
    assert shorten("a" * 50 + "\n" + "b" * 50, 21) == "a" * 9 + " … " + "b" * 9


def test_what_is_not_there_is_said(run, tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    (tmp_path / "other" / "samples").mkdir(parents=True)
    assert main([str(tmp_path / "other")]) == 2
    assert "trainer.samples_freq" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"no train step 5. Near it: 1, 7"):
        read_samples(run, 5)
    (run / "samples" / "train_000010.parquet").write_bytes(b"half")
    with pytest.raises(DataError, match="cannot be read"):
        read_samples(run)
    with pytest.raises(DataError, match="no responses from validation"):
        read_samples(tmp_path / "other", split="val")


def said(role, content, **more):
    return {"role": role, "content": content, **more}


CALCULATED = [
    said("assistant", 'I will. <tool_call>{"name": "mul"}</tool_call>'),
    said("tool", "391", name="mul", arguments='{"a": 17, "b": 23}', seconds=0.0123),
    said("assistant", "391"),
]
PLAYED = [said("assistant", "16"), said("user", "higher"), said("assistant", "24")]


@pytest.fixture
def conversations(run):
    """Step 9 has a call and its result, a game, one turn, and a failed trajectory."""
    alone = [said("assistant", "no")]
    messages = [json.dumps(each, ensure_ascii=False) for each in (CALCULATED, PLAYED, alone, alone)]
    table = frame(
        9, [1.0, 1, 0, 0], messages=messages,
        agent_failed=["", "", "", "the agent's process ended"], num_turns=[2, 3, 1, 1], tool_errors=[0, 1, 0, 0],
        unreadable_calls=[0, 0, 2, 0], calls_not_run=0,
    )  # fmt: skip
    table.to_parquet(run / "samples" / "train_000009.parquet")
    return run


def test_a_conversation_is_shown_message_by_message(conversations, capsys):
    text = shown(capsys, conversations, "-n", 3)
    order = [
        "prompt: <user>0+0=?", "policy, turn 1: I will. <tool_call>", 'tool mul {"a": 17, "b": 23} (0.0123 s): 391',
        "policy, turn 2: 391", "ground_truth: 0", "policy, turn 1: 16", "user: higher", "policy, turn 2: 24",
    ]  # fmt: skip
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "answer:" not in text, "it would say the same once more"
    assert "messages" not in text


def test_a_conversation_fits_a_line(conversations, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = shown(capsys, conversations, "--lines").splitlines()
    assert lines[0] == "0+0=? -> [mul 17, 23 = 391] -> 391 ✓"
    assert lines[2] == "0+0=? -> 16 -> [higher] -> 24 ✓"


@pytest.mark.parametrize(
    ("order", "first"), [("--most-turns", [1, 2, 0, 3]), ("--failed-tools", [2, 1]), ("--failed", [3])]
)
def test_conversations_come_in_the_order_that_is_asked_for(conversations, capsys, order, first):
    text = shown(capsys, conversations, order)
    heads = [line for line in text.splitlines() if "step 9 data_source" in line]
    assert [2 * int(head.split(" row ")[1][0]) + int(head.split(" sample ")[1][0]) for head in heads] == first
    assert ("agent_failed: the agent's process ended" in text) == (3 in first)


def test_an_answer_does_not_steer_the_terminal(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    hostile = "\x1b]52;c;cm0gLXJmIH4=\x07\x9b2J\x1b[31m red \r over \ud83d 漢字"
    calls = [said("assistant", hostile), said("tool", hostile, name=hostile, arguments=hostile, seconds=1.0)]
    table = frame(10, [1.0] * 4, messages=[json.dumps(calls)] * 2 + [""] * 2, num_turns=2)
    for column in ("agent_failed", "answer", "prompt", "reward_error"):
        table[column] = hostile.replace("\ud83d", "")
    table.to_parquet(run / "samples" / "train_000010.parquet")
    for flags in ([], ["--lines"]):
        text = shown(capsys, run, *flags)
        assert "red" in text
        assert "漢字" in text
        assert not set(text) & set("\x1b\x07\x9b\r\ud83d")
