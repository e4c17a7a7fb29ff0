"""The tiny model of examples/agent_cpu.sh, and the commands that make and train it."""

import argparse
import random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltrain.data_preprocess import arithmetic, guess_number
from scripts import make_small_agent as script
from scripts.make_small_model import END
from tests.scripts.example import accept_commands, run_example

CONVERTERS = {"calculator": arithmetic, "guess": guess_number}


def tokenizer_of(task):
    return script.tokenizer_of(argparse.Namespace(task=task, low=1, high=15))


def as_messages(conversation, task):
    """What the run would have of a conversation: calls apart from what is said."""
    prompt, said = conversation
    messages = [{"role": "user", "content": prompt}]
    for place, text in enumerate(said):
        if text.startswith(script.OPEN):
            expression = text.removeprefix(script.OPEN).removesuffix(script.CLOSE)
            call = {"name": "calculator", "arguments": {"expression": expression}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": call}]})
        elif place % 2 == 0:
            messages.append({"role": "assistant", "content": text})
        elif task == "calculator":
            result = text.removeprefix(script.RESULT).removesuffix(script.END_RESULT)
            messages.append({"role": "tool", "content": result})
        else:
            messages.append({"role": "user", "content": text})
    return messages


@pytest.mark.parametrize("task", ["calculator", "guess"])
def test_the_warm_up_shows_what_the_template_writes(task):
    rng, tokenizer = random.Random(0), tokenizer_of(task)
    talk = script.asked_for_a_sum if task == "calculator" else script.guessing("{low}-{high}?", 1, 15)
    tools = script.TOOLS if task == "calculator" else None
    lengths = set()
    for number in range(40):
        conversation = talk(rng, number / 40)
        ids, labels = script.as_tokens(tokenizer, conversation, task)
        messages = as_messages(conversation, task)
        assert ids.tolist() == tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
        said = "".join(text + END for text in conversation[1][::2])
        assert tokenizer.decode(labels[labels != -100]) == said
        lengths.add(len(messages))
    assert len(lengths) > 1


@pytest.mark.parametrize("task", ["calculator", "guess"])
def test_the_commands_of_the_example_are_accepted(task, tmp_path, capsys):
    process = run_example(tmp_path, "agent_cpu.sh", TASK=task, WARM_UP=2)
    assert (process.returncode, process.stderr) == (0, "")
    accept_commands(tmp_path, CONVERTERS[task], script, "make_small_agent", capsys)
    (model,) = (tmp_path / "out").glob("*model*")
    assert len(AutoTokenizer.from_pretrained(model)) == len(tokenizer_of(task))
    assert sum(weights.numel() for weights in AutoModelForCausalLM.from_pretrained(model).parameters()) < 5e5


def test_the_example_knows_two_tasks(tmp_path):
    process = run_example(tmp_path, "agent_cpu.sh", TASK="chess")
    assert (process.returncode, process.stderr) == (2, "error: TASK=chess: it is calculator or guess\n")
