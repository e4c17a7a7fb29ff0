"""Environments, classes with tools, and agents between the turns of a response."""

import ast
from pathlib import Path

import pytest

from rltrain.common.columns import names as c
from rltrain.trainer.progress import ANSWERS
from tests.tiny_tools import END_ID, tool_run
from tests.trainer.steps import generated

EXAMPLES = Path(__file__).parents[2] / "examples/agents"
R = "actor_rollout_ref__rollout__"
ENVIRONMENT = '''
class Count:
    """Says how many turns there were."""

    def __init__(self, most=2):
        self.turns, self.most = 0, most

    def reset(self, row, seed):
        self.name, self.seed = row["data_source"], seed

    def step(self, text):
        self.turns += 1
        return f"{self.turns} {self.name} {self.seed % 1000}", 0.25, self.turns == self.most
'''
AGENT = """
async def agent(chat, row, seed):
    turn = await chat.reply()
    chat.add("user", "again")
    second = await chat.reply()
    return {"score": 0.5, "turns": len(chat.turns), "same": turn.text == second.text}
"""


@pytest.fixture
def settings(tmp_path, calling):
    """settings(key, code, name): return the settings of a run whose turns get replies from it."""

    def make(key, code, name):
        (tmp_path / "own.py").write_text(code)
        run = tool_run(calling, tmp_path)
        del run[R + "multi_turn__function_tool_path"]
        return run | {R + key: f"{tmp_path}/own.py:{name}"}

    return make


def test_an_environment_answers_and_scores(process_group, tiny_trainer, settings):
    run = settings("multi_turn__environment", ENVIRONMENT, "Count")
    trainer = tiny_trainer(**run, **{R + "multi_turn__environment_kwargs": "{most: 3}"})
    answers, texts, numbers = generated(trainer)
    turns = numbers[c.NUM_TURNS]
    assert turns.max() == 3
    for (answer, mask), text, count in zip(answers, texts, turns.tolist(), strict=True):
        assert mask[0], mask[-1]
        assert [message["role"] for message in text.trajectory_info["messages"]] == ["assistant", "user"] * (
            count - 1
        ) + ["assistant"]
        info = text.trajectory_info
        assert info["agent_score"] == 0.25 * sum(bool(end) for end in info["tool_rewards"])
        assert answer.count(END_ID) >= count - 1
    all_messages = [text.trajectory_info["messages"] for text in texts]
    said = [messages[1]["content"] for messages in all_messages if len(messages) > 1]
    assert said[0].startswith("1 rltrain/arithmetic ")
    # One seed for all answers to a prompt, so that they begin alike.
    n = len(answers) // 4
    infos, starts = [text.trajectory_info for text in texts], range(0, 4 * n, n)
    of_prompt = [
        {info["messages"][1]["content"] for info in infos[at : at + n] if info["num_turns"] > 2} for at in starts
    ]
    assert all(len(each) <= 1 for each in of_prompt)
    assert len(set().union(*of_prompt)) > 1
    metrics = trainer.step(1).metrics
    assert metrics["num_turns/max"] == 6
    assert metrics["agent/failed"] == 0
    assert metrics["training/rollout_probs_diff_mean"] < 1e-4
    assert metrics["actor/grad_norm"] > 0


def test_an_agent_leads_the_answers(process_group, tiny_trainer, settings):
    trainer = tiny_trainer(**settings("agent__default_agent_loop", AGENT, "agent"))
    _, texts, numbers = generated(trainer)
    assert numbers[c.NUM_TURNS].max() == 2
    for text, count in zip(texts, numbers[c.NUM_TURNS].tolist(), strict=True):
        if count == 2:
            assert text.trajectory_info["agent_score"] == 0.5
            assert text.trajectory_info["agent_numbers"]["turns"] == 2


def test_an_agent_of_a_library_leads_the_answers_token_for_token(process_group, tiny_trainer, settings):
    """The same conversation by OpenAI's client, as in the example, and by the chat itself."""
    example = (EXAMPLES / "self_check.py").read_text()
    own = f"""
async def agent(chat, row, seed):
    await chat.reply()
    chat.add("user", {self_check_words(example)!r})
    await chat.reply()
"""
    (expected, _, _), (answers, texts, numbers) = (
        generated(tiny_trainer(**settings("agent__default_agent_loop", code, "agent"))) for code in (own, example)
    )
    assert answers == expected
    assert numbers[c.NUM_TURNS].max() == 2
    assert not numbers[c.AGENT_FAILED].any()  # those without room for a second turn among them
    assert all("agent_score" not in text.trajectory_info for text in texts)


def self_check_words(code):
    return next(ast.literal_eval(line.removeprefix("CHECK = ")) for line in code.splitlines() if "CHECK = " in line)


KILLED = """
import os, signal
from pathlib import Path

class Killed(Count):
    def step(self, text):
        flag = Path(__file__).with_name("killed")
        if self.turns == 1 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(text)
"""


def test_a_process_that_is_killed_changes_no_token(process_group, tiny_trainer, settings, tmp_path):
    code = ENVIRONMENT.replace("most=2", "most=4") + KILLED
    quiet, *_ = generated(tiny_trainer(**settings("multi_turn__environment", code, "Count")))
    hurt, _, numbers = generated(tiny_trainer(**settings("multi_turn__environment", code, "Killed")))
    assert (tmp_path / "killed").exists()
    assert hurt == quiet
    assert not numbers[c.AGENT_FAILED].any()


CARRY = {
    R + "tail": "carry_over", R + "oversample_ratio": 1.5, R + "max_num_seqs": 4,
    "algorithm__rollout_correction__rollout_is": "token",
}  # fmt: skip


def test_what_waits_for_a_later_step_behind_its_first_turn_begins_anew(process_group, tiny_trainer, settings):
    trainer = tiny_trainer(**settings("multi_turn__environment", ENVIRONMENT, "Count"), **CARRY)
    anew = step = 0
    while not anew:
        step += 1
        assert step < 12, "none has begun anew"
        answered = trainer.step(step)
        anew += answered.metrics.get("agent/begun_anew", 0)
        assert answered.metrics["training/rollout_probs_diff_mean"] < 1e-4 or step > 1
        lengths, turns = (answered.samples[name] for name in (c.RESPONSE_LENGTH, c.NUM_TURNS))
        assert (lengths > 0).all()
        assert (turns > 0).all()


def test_tools_that_a_resume_brings_begin_anew_what_waits_without_them(process_group, tiny_trainer, settings, tmp_path):
    keys = settings("multi_turn__environment", ENVIRONMENT, "Count") | CARRY
    alone = tiny_trainer(**{key: value for key, value in keys.items() if "multi_turn" not in key})
    alone.step(1)
    progress = alone.progress
    assert progress.answers
    alone.actor.save_answers(progress.answers, str(tmp_path / ANSWERS))
    resumed = tiny_trainer(**keys)
    resumed.restore(progress, tmp_path)
    assert (resumed.step(2).samples[c.NUM_TURNS] > 0).all()
