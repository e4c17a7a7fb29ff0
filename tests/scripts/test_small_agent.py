"""The tiny model of examples/agent_cpu.sh, and the commands that make and train it."""

import argparse

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltrain.data_preprocess import arithmetic, guess_number
from scripts import make_small_agent as script
from tests.scripts.example import accept_commands, run_example

CONVERTERS = {"calculator": arithmetic, "guess": guess_number}


def tokenizer_of(task):
    return script.tokenizer_of(argparse.Namespace(task=task, low=1, high=15))


@pytest.mark.parametrize("task", ["calculator", "guess"])
def test_the_commands_of_the_example_are_accepted(task, tmp_path, capsys):
    process = run_example(tmp_path, "agent_cpu.sh", TASK=task, WARM_UP=0)
    assert (process.returncode, process.stderr) == (0, "")
    accept_commands(tmp_path, CONVERTERS[task], script, "make_small_agent", capsys)
    (model,) = (tmp_path / "out").glob("*model*")
    assert len(AutoTokenizer.from_pretrained(model)) == len(tokenizer_of(task))
    assert sum(weights.numel() for weights in AutoModelForCausalLM.from_pretrained(model).parameters()) < 5e5
