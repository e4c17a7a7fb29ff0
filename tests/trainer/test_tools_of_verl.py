"""Responses with verl's tools between their turns, and rows whose tools differ from their neighbours'."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.common.columns import names as c
from tests.tiny_tools import tool_run

R = "actor_rollout_ref__rollout__multi_turn__"
TOOLS = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class Add(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.sums = {}

    async def create(self, instance_id=None, **kwargs):
        name, said = await super().create(instance_id)
        self.sums[name] = kwargs["create_kwargs"]["start"]
        return name, said

    async def execute(self, instance_id, parameters, **kwargs):
        self.sums[instance_id] += parameters["a"] + parameters["b"]
        return ToolResponse(text=str(self.sums[instance_id])), 0.5, {}

    async def release(self, instance_id, **kwargs):
        del self.sums[instance_id]
"""
CONFIG = """
tools:
  - class_name: {folder}/tools_of_verl.py:Add
    config: {{type: native}}
    tool_schema:
      type: function
      function:
        name: add
        description: Add.
        parameters: {{type: object, properties: {{a: {{type: integer}}, b: {{type: integer}}}}, required: [a, b]}}
"""


@pytest.fixture
def answered(process_group, tiny_trainer, calling, tmp_path):
    """answered(rows): return the numbers and texts of responses to rows, which are (agent_name, extra_info)."""

    def run(*asked):
        (tmp_path / "tools_of_verl.py").write_text(TOOLS)
        (tmp_path / "tools.yaml").write_text(CONFIG.format(folder=tmp_path))
        rows = [
            {
                "data_source": "rltrain/arithmetic",
                "prompt": [{"role": "user", "content": f"{number}+1=?"}],
                "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
                "extra_info": extra,
                "agent_name": agent,
            }
            for number, (agent, extra) in enumerate(asked)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        files = dict.fromkeys(("data__train_files", "data__val_files"), tmp_path / "rows.parquet")
        run = tool_run(calling, tmp_path) | files | {R + "tool_config_path": tmp_path / "tools.yaml"}
        trainer = tiny_trainer(**run | {R + "function_tool_path": "null", "data__shuffle": False})
        _, texts, numbers = trainer.worker.rollout.generate(trainer.experience_task())
        return texts, numbers.per_sample

    return run


def test_a_tool_of_verls_keeps_its_sum_for_an_answer_and_starts_as_the_row_says(answered):
    """A row without tools has one turn, even if its response looks like a call."""
    kwargs = [{"tools_kwargs": {"add": {"create_kwargs": {"start": 100 * number}}}} for number in range(4)]
    agents = ["tool_agent", "single_turn_agent"] * 2
    texts, numbers = answered(*zip(agents, kwargs, strict=True))
    n = len(texts) // 4
    alone = np.repeat([False, True, False, True], n)
    assert (numbers[c.NUM_TURNS][alone] == 1).all()
    assert not numbers[c.TOOL_CALLS][alone].any()
    assert numbers[c.TOOL_CALLS].max() > 1
    assert not numbers[c.TOOL_ERRORS].any()
    for place, text in enumerate(texts):
        results = [message["content"] for message in text.trajectory_info["messages"] if message["role"] == "tool"]
        assert results == [str(100 * (place // n) + 5 * (call + 1)) for call in range(len(results))]
        assert [reward for reward in text.trajectory_info["tool_rewards"] if reward] == [0.5] * len(results)
