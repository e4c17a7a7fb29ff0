"""Environments, classes with tools and agents between the turns of an answer."""

import ast
import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from rltrain.base.columns import names as c
from rltrain.trainer.progress import ANSWERS
from tests.tiny_tools import END_ID, save_calling_model, tool_run
from tests.trainer.steps import actor_weights

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
SHOP = '''
class Shop:
    """Adds, and remembers."""

    def __init__(self):
        self.sum = 0

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One of them.
            b: The other.
        """
        self.sum += a + b
        return str(self.sum)

    def score(self):
        return {"score": self.sum, "sums": self.sum}
'''
AGENT = """
async def agent(chat, row, seed):
    turn = await chat.reply()
    chat.add("user", "again")
    second = await chat.reply()
    return {"score": 0.5, "turns": len(chat.turns), "same": turn.text == second.text}
"""


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    return save_calling_model(tmp_path_factory.mktemp("calling") / "model")


@pytest.fixture
def settings(tmp_path, calling):
    """settings(key, code, name): of a run whose answers are answered by it."""

    def make(key, code, name):
        (tmp_path / "own.py").write_text(code)
        run = tool_run(calling, tmp_path)
        del run[R + "multi_turn__function_tool_path"]
        return run | {R + key: f"{tmp_path}/own.py:{name}"}

    return make


def generated(trainer):
    batch, texts, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    rows = (batch.ragged(name).rows() for name in (c.RESPONSE, c.RESPONSE_MASK))
    return [(answer.tolist(), mask.tolist()) for answer, mask in zip(*rows, strict=True)], texts, numbers.per_sample


def test_an_environment_answers_and_scores(process_group, tiny_trainer, settings):
    run = settings("multi_turn__environment", ENVIRONMENT, "Count")
    trainer = tiny_trainer(**run, **{R + "multi_turn__environment_kwargs": "{most: 3}"})
    answers, texts, numbers = generated(trainer)
    turns = numbers[c.NUM_TURNS]
    assert turns.max() == 3
    for (answer, mask), text, count in zip(answers, texts, turns.tolist(), strict=True):
        assert mask[0], mask[-1]
        assert [message["role"] for message in text.told["messages"]] == ["assistant", "user"] * (count - 1) + [
            "assistant"
        ]
        assert text.told["agent_score"] == 0.25 * sum(bool(end) for end in text.told["tool_rewards"])
        assert answer.count(END_ID) >= count - 1
    said = [text.told["messages"][1]["content"] for text in texts if len(text.told["messages"]) > 1]
    assert said[0].startswith("1 rltrain/arithmetic ")
    # One seed for all answers to a prompt, so that they begin alike.
    n = len(answers) // 4
    seeds = [
        [
            text.told["messages"][1]["content"]
            for text in texts[place * n : (place + 1) * n]
            if text.told["num_turns"] > 2
        ]
        for place in range(4)
    ]
    assert all(len(set(each)) <= 1 for each in seeds)
    assert len({each[0] for each in seeds if each}) > 1


def test_a_class_with_tools_has_an_instance_for_each_answer(process_group, tiny_trainer, settings):
    trainer = tiny_trainer(**settings("multi_turn__environment", SHOP, "Shop"))
    _, texts, numbers = generated(trainer)
    calls = numbers[c.TOOL_CALLS]
    assert calls.max() > 1
    for text, count in zip(texts, numbers[c.NUM_TURNS].tolist(), strict=True):
        results = [message["content"] for message in text.told["messages"] if message["role"] == "tool"]
        assert results == [str(5 * (at + 1)) for at in range(count - 1)]
        assert text.told["agent_numbers"] == {"sums": text.told["agent_score"]}


def test_an_agent_leads_the_answers(process_group, tiny_trainer, settings):
    trainer = tiny_trainer(**settings("agent__default_agent_loop", AGENT, "agent"))
    _, texts, numbers = generated(trainer)
    assert numbers[c.NUM_TURNS].max() == 2
    for text, count in zip(texts, numbers[c.NUM_TURNS].tolist(), strict=True):
        if count == 2:
            assert text.told["agent_score"] == 0.5
            assert text.told["agent_numbers"]["turns"] == 2


def test_an_agent_of_a_library_leads_the_answers_token_for_token(process_group, tiny_trainer, settings):
    """The same conversation by OpenAI's client, as the example has it, and by the chat itself."""
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
    assert all("agent_score" not in text.told for text in texts)


def self_check_words(code):
    return next(ast.literal_eval(line.removeprefix("CHECK = ")) for line in code.splitlines() if "CHECK = " in line)


def test_a_process_that_is_killed_changes_no_token(process_group, tiny_trainer, settings, tmp_path):
    run = settings("multi_turn__environment", ENVIRONMENT.replace("most=2", "most=4"), "Count")
    quiet, *_ = generated(tiny_trainer(**run))
    trainer = tiny_trainer(**run)
    hosts = trainer.worker.rollout._answering._hosts
    go_on, killed = hosts.go_on, []

    def kill_first(number, turn):
        held, host = hosts._held[number]
        # Whoever is at work alone when a second process dies is at fault.
        if len(held.turns) == 2 and len(killed) < 3 and not (host._alone or host._suspects):
            killed.append(number)
            with suppress(ProcessLookupError):  # it is being replaced
                os.kill(host._process.pid, signal.SIGKILL)
        go_on(number, turn)

    hosts.go_on = kill_first
    hurt, _, numbers = generated(trainer)
    assert killed
    assert hurt == quiet
    assert not numbers[c.AGENT_FAILED].any()


def test_the_answers_of_a_step_are_learnt_from(process_group, tiny_trainer, settings):
    trainer = tiny_trainer(**settings("multi_turn__environment", ENVIRONMENT, "Count"))
    answered = trainer.step(1)
    assert answered.metrics["num_turns/max"] == 4
    assert answered.metrics["agent/failed"] == 0
    assert answered.metrics["training/rollout_probs_diff_mean"] < 1e-4
    assert np.isfinite(answered.metrics["actor/grad_norm"])


def test_what_waits_for_a_later_step_behind_its_first_turn_begins_anew(process_group, tiny_trainer, settings):
    carry = {R + "tail": "carry_over", R + "oversample_ratio": 1.5, R + "max_num_seqs": 4}
    carry |= {"algorithm__rollout_correction__rollout_is": "token"}
    slow = ENVIRONMENT.replace(
        "        self.turns += 1", "        import time; time.sleep(0.05)\n        self.turns += 1"
    )
    trainer = tiny_trainer(**settings("multi_turn__environment", slow, "Count"), **carry)
    anew = step = 0
    while not anew:
        step += 1
        assert step < 6, "none has begun anew"
        answered = trainer.step(step)
        anew += answered.metrics.get("agent/begun_anew", 0)
        assert answered.metrics["training/rollout_probs_diff_mean"] < 1e-4 or step > 1
        assert answered.metrics["rollout/tail/tokens_generated"] >= 0
        assert answered.metrics["agent/reused_share"] > 0.3
        lengths, turns = (answered.samples[name] for name in (c.RESPONSE_LENGTH, c.NUM_TURNS))
        assert (lengths > 0).all()
        assert (turns > 0).all()


def test_tools_that_a_resume_brings_begin_anew_what_waits_without_them(process_group, tiny_trainer, settings, tmp_path):
    carry = {R + "tail": "carry_over", R + "oversample_ratio": 1.5, R + "max_num_seqs": 4}
    carry |= {"algorithm__rollout_correction__rollout_is": "token"}
    keys = settings("multi_turn__environment", ENVIRONMENT, "Count") | carry
    alone = tiny_trainer(**{key: value for key, value in keys.items() if "multi_turn" not in key})
    alone.step(1)
    progress = alone.progress
    assert progress.answers
    alone.actor.save_answers(progress.answers, str(tmp_path / ANSWERS))
    resumed = tiny_trainer(**keys)
    resumed.restore(progress, tmp_path)
    assert (resumed.step(2).samples[c.NUM_TURNS] > 0).all()


SLOW = """
import random, time

class Slow(Shop):
    def __init__(self, most_s):
        super().__init__()
        self.most_s = most_s

    def add(self, a: int, b: int) -> str:
        \"\"\"Add two numbers.

        Args:
            a: One of them.
            b: The other.
        \"\"\"
        time.sleep(random.random() * self.most_s)
        return super().add(a, b), 0.25
"""


# Of tokens alone: test_a_process_that_is_killed_changes_no_token, and test_tools.py of how long tools take.
@pytest.mark.long
@pytest.mark.parametrize(("at_once", "processes"), [(4, 2), (4, 1), (64, 1), (64, 2)])
def test_latencies_places_and_processes_change_no_token_and_no_weight(
    process_group, tiny_trainer, settings, at_once, processes
):
    def run(most_s, **keys):
        made = settings("multi_turn__environment", SHOP + SLOW, "Slow") | keys
        trainer = tiny_trainer(**made, **{R + "multi_turn__environment_kwargs": f"{{most_s: {most_s}}}"})
        answers, texts, _ = generated(trainer)
        trainer.step(1)
        return answers, [(text.told["tool_rewards"], text.told["agent_score"]) for text in texts], trainer

    keys = {R + "max_num_seqs": at_once, R + "multi_turn__num_tool_processes": processes}
    quick_answers, quick_rewards, quick = run(0)
    answers, rewards, slow = run(0.2, **keys)
    assert answers == quick_answers
    assert rewards == quick_rewards
    assert any(len(each) > 1 for each, _ in rewards)
    assert actor_weights(slow).equal(actor_weights(quick))
