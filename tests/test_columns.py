"""Real steps of several algorithms use the columns that `rltrain.common.columns.names` lists, and no others."""

import numpy as np
import pytest
import torch

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.runtime.samples import Samples
from tests.local import LocalGroup, local_trainer
from tests.tiny import small_run
from tests.tiny_tools import save_calling_model, tool_run
from tests.trainer.steps import TAUGHT

pytestmark = pytest.mark.usefixtures("process_group")

A, R = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
CORRECTION = "algorithm__rollout_correction__"
CONFIGS = {
    "gae": {
        "algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": True, CORRECTION + "rollout_is": "token",
        CORRECTION + "rollout_rs": "token_k1", CORRECTION + "rollout_rs_threshold": 2.0,
    },
    "remax": {
        **TAUGHT, "algorithm__adv_estimator": "remax", A + "use_kl_loss": False,
        A + "policy_loss__loss_mode": "clip_cov",
    },
    "carry_over": {
        "algorithm__adv_estimator": "optimal_token_baseline",
        CORRECTION + "rollout_is": "token", R + "tail": "carry_over", R + "oversample_ratio": 1.5,
        "data__max_response_length": 20,
        "reward_model__reward_manager": "dapo", "reward_model__overlong_buffer__enable": True,
        "reward_model__overlong_buffer__len": 4,
    },
    "over the mini-batch": {A + "policy_loss__loss_mode": "real", A + "top_entropy_quantile": 0.5},
}  # fmt: skip
# Scoring processes make it, of which these steps have none; a reward model makes the other; neither prompts nor tools
# here have images.
# Supervised fine-tuning makes the sum of log-probs.
MADE_ELSEWHERE = {c.REWARD_ERROR, c.MODEL_SCORE, c.IMAGES, c.RESPONSE_IMAGES, c.LOG_PROB_SUM}
MADE_ELSEWHERE |= {c.ROUTED_EXPERTS}  # of a model with experts: tests/trainer/test_router_replay.py
MADE_ELSEWHERE |= {c.JUDGE_MESSAGE, c.MESSAGE_LENGTH, c.JUDGE_REPLY}  # with a judge on the devices alone


def shape_and_dtype(name, column) -> tuple[tuple[str, ...], str]:
    """Return the listed shapes of a column, and its dtype."""
    if isinstance(column, DictionaryColumn):
        return (c.PER_PROMPT_TOKEN,), str(column.values.values.dtype).removeprefix("torch.")
    if isinstance(column, Ragged):
        return (c.PER_ANSWER_TOKEN, c.PER_POLICY_TOKEN), str(column.values.dtype).removeprefix("torch.")
    if isinstance(column, torch.Tensor | np.ndarray):
        dtype = str(column.dtype).removeprefix("torch.")
        texts = dtype == "object" and not any(isinstance(value, np.ndarray) for value in column)
        return (c.PER_SAMPLE,), "str" if texts else dtype
    return (c.PER_SAMPLE,), "str"


def test_a_step_makes_the_columns_that_are_listed(tiny_model, arithmetic_files, tmp_path, monkeypatch):
    found: dict[str, set] = {}

    def seen(columns):
        for name, column in columns.items():
            if not name.startswith(c.SCORER):
                found.setdefault(name, set()).add(shape_and_dtype(name, column))

    def spied(cls, update):
        return lambda self, columns: (seen(columns), update(self, columns))[1]

    run = LocalGroup.run

    def spied_run(self, call):
        result = run(self, call)
        if isinstance(result, tuple) and hasattr(result[-1], "per_sample"):
            seen(result[-1].per_sample)
            seen({c.TEXT: result[1]} if len(result) == 3 else {})
        return result

    monkeypatch.setattr(Batch, "update", spied(Batch, Batch.update))
    monkeypatch.setattr(Samples, "update", spied(Samples, Samples.update))
    monkeypatch.setattr(LocalGroup, "run", spied_run)
    for changes in CONFIGS.values():
        scores = iter(range(10**6))
        arguments = small_run(tiny_model, arithmetic_files, tmp_path, **changes)
        trainer = local_trainer(arguments, lambda row, score, scores=scores: score + next(scores) % 3)
        for step in (1, 2):
            trainer.step(step)
    calling = tool_run(save_calling_model(tmp_path / "calling"), tmp_path)
    local_trainer(small_run(tmp_path / "calling", arithmetic_files, tmp_path, **calling)).step(1)
    assert found.keys() - c.COLUMNS.keys() == set(), "made, but not listed"
    assert c.COLUMNS.keys() - found.keys() == MADE_ELSEWHERE, "listed, but never made"
    for name, kinds in found.items():
        for shapes, dtype in kinds:
            assert c.COLUMNS[name].shape in shapes, name
            assert dtype in c.COLUMNS[name].dtype.split(" or "), name
