"""A run whose policy calls tools, by the command: from the first prompt to the saved samples."""

import json
import re

import pytest

import rltrain
from rltrain.tools.view import main
from tests.tiny import small_run
from tests.tiny_tools import save_calling_model, tool_run

PRODUCT = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17*23"}}\n</tool_call>'

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(extra_info["num_turns"]), "told": float(len(extra_info["tool_rewards"]))}
"""


@pytest.mark.smoke("A run with tool calls")
@pytest.mark.usefixtures("joined")
def test_a_run_with_tools(arithmetic_files, tmp_path, capsys):
    (tmp_path / "reward.py").write_text(REWARD)
    tools = tool_run(save_calling_model(tmp_path / "model"), tmp_path)
    keys = {"custom_reward_function__path": tmp_path / "reward.py", "trainer__n_gpus_per_node": 2}
    keys |= {"trainer__rollout_data_dir": tmp_path / "lines"}
    result = rltrain.train(small_run(tmp_path / "model", arithmetic_files, tmp_path / "run", **tools, **keys))
    metrics = result.newest()
    assert metrics["num_turns/max"] > 2
    # The scorers of all processes got the turns of each response.
    assert metrics["critic/score/max"] == metrics["num_turns/max"]
    assert metrics["rollout/log_prob_gap/mean"] < 1e-5
    answers = rltrain.read_samples(tmp_path / "run")
    assert (answers["score"] == 2 * answers["num_turns"]).all()
    assert (answers["told"] == answers["tool_calls"]).all()
    assert answers["tool_calls"].sum() > 0
    # Each conversation is kept and shown with its calls and results.
    turns = [sum(message["role"] == "assistant" for message in json.loads(each)) for each in answers["messages"]]
    assert turns == answers["num_turns"].tolist()
    assert (answers["agent_failed"] == "").all()
    newest = max((tmp_path / "lines").iterdir(), key=lambda file: int(file.stem))
    lines = [json.loads(line) for line in newest.read_text().splitlines()]
    assert [line["messages"] for line in lines] == [json.loads(each) for each in answers["messages"]]
    capsys.readouterr()
    assert main([str(tmp_path / "run"), "--most-turns", "-n", "1"]) == 0
    text = capsys.readouterr().out
    assert re.search(r'policy, turn 1: .*tool add \{"a": 2, "b": 3\} \(\S+ s\): 5\npolicy, turn 2: ', text, re.DOTALL)
    assert main([str(tmp_path / "run"), "--most-turns", "-n", "1", "--lines"]) == 0
    assert " -> 5 -> " in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.usefixtures("joined")
def test_a_run_with_the_calculator_that_comes_along(arithmetic_files, tmp_path):
    tools = tool_run(save_calling_model(tmp_path / "model", call=PRODUCT), tmp_path)
    tools["actor_rollout_ref__rollout__multi_turn__function_tool_path"] = "rltrain.agents.ready.calculator"
    rltrain.train(small_run(tmp_path / "model", arithmetic_files, tmp_path / "run", **tools))
    answers = rltrain.read_samples(tmp_path / "run")
    called = answers[answers["tool_calls"] > 0]
    assert len(called)
    assert called["answer"].str.contains("<tool_response>\n391\n</tool_response>", regex=False).all()
    assert answers["tool_errors"].sum() == 0
