"""A run whose policy calls tools, by the command: from the first prompt to the kept answers."""

import pytest

import rltrain
from tests.tiny import small_run
from tests.tiny_tools import save_calling_model, tool_run

PRODUCT = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17*23"}}\n</tool_call>'

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(extra_info["num_turns"]), "told": float(len(extra_info["tool_rewards"]))}
"""


@pytest.mark.usefixtures("joined")
def test_a_run_with_tools(arithmetic_files, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    tools = tool_run(save_calling_model(tmp_path / "model"), tmp_path)
    keys = {"custom_reward_function__path": tmp_path / "reward.py", "trainer__n_gpus_per_node": 2}
    result = rltrain.train(small_run(tmp_path / "model", arithmetic_files, tmp_path / "run", **tools, **keys))
    metrics = result.newest()
    assert metrics["num_turns/max"] > 2
    # The scorers of all processes were told of the turns of each answer.
    assert metrics["critic/score/max"] == metrics["num_turns/max"]
    assert metrics["rollout/log_prob_gap/mean"] < 1e-5
    answers = rltrain.read_samples(tmp_path / "run")
    assert (answers["score"] == 2 * answers["num_turns"]).all()
    assert (answers["told"] == answers["tool_calls"]).all()
    assert answers["tool_calls"].sum() > 0


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
