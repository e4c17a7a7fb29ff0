"""Responses of 16,384 tokens, on two ranks: waited for, or continued in later steps."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rltrain
from bench import workload
from tests.tiny import small_run

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("joined")]

R, ALG = "actor_rollout_ref__rollout__", "algorithm__"
LENGTH = 16_384
CARRY_OVER = {
    R + "tail": "carry_over",
    R + "oversample_ratio": 2,
    R + "tail_max_age": 1,
    ALG + "rollout_correction__rollout_is": "token",
}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) % 7 / 7
"""


@pytest.fixture
def inputs(tmp_path):
    """Prompts, and a model that gives most responses about 20 tokens, and never ends the others."""
    workload.make(tmp_path, "long_tail", "test", 1)
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    head = model.lm_head.weight.data
    # `workload.steer`: the difference of the two numbers is the logit after a token of the first half, their sum that
    # after one of the second half, in a unit that the end token's known logit gives.
    unit = float(head[end, 0] - head[end, 1]) / math.log(workload.VOCABULARY / 2 / 24)

    def logits(in_first: float, in_second: float) -> torch.Tensor:
        return torch.tensor([(in_first + in_second) / 2, (in_second - in_first) / 2]) * unit

    head[(head[:, :2] == head[-1, :2]).all(1), :2] = logits(-math.log(60), 16.0)
    head[end, :2] = logits(math.log(workload.VOCABULARY / 2 / 24), -40.0)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * LENGTH}))
    return folder, (tmp_path / "train.parquet",) * 2


def train(inputs, folder, steps, **changes):
    """Return the table of a run."""
    model, files = inputs
    keys = {
        "data__max_prompt_length": 64, "data__max_response_length": LENGTH, R + "n": 2, R + "max_num_seqs": 16,
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": LENGTH + 64, "trainer__n_gpus_per_node": 2,
        "trainer__total_training_steps": steps, "custom_reward_function__path": folder / "reward.py",
    }  # fmt: skip
    (folder / "reward.py").write_text(REWARD)
    table = rltrain.train(small_run(model, files, folder / "run", **keys, **changes)).table()
    assert (table["rollout/log_prob_gap/mean"] < 1e-4).all()
    assert (table["actor/grad_norm"] > 0).all()
    return table


def test_a_step_waits_for_responses_of_16384_tokens(inputs, tmp_path):
    table = train(inputs, tmp_path, 1)
    assert table["response_length/max"].tolist() == [LENGTH]
    assert 0 < table["response_length/clip_ratio"].iloc[0] < 1


def test_responses_of_16384_tokens_are_continued_in_the_next_step(inputs, tmp_path):
    table = train(inputs, tmp_path, 2, **CARRY_OVER)
    first, second = table["response_length/max"]
    assert first < second == LENGTH
    assert table["rollout/tail/prompts_carried_over"].iloc[0] > 0
    assert table["rollout/tail/carried_tokens"].iloc[1] > 0
