"""Steps that end early, with real workers: answers are stopped and continued across processes."""

import json

import numpy as np
import pytest

from rltrain.main_ppo import main
from rltrain.run.report.table import read_metrics
from tests.tiny import small_run

pytestmark = pytest.mark.usefixtures("joined")

ROLLOUT = "actor_rollout_ref__rollout__"
CARRY = {
    ROLLOUT + "tail": "carry_over",
    ROLLOUT + "oversample_ratio": 1.75,
    "algorithm__rollout_correction__rollout_is": "token",
    "data__max_response_length": 24,
    "trainer__n_gpus_per_node": 2,
    "trainer__save_freq": 3,
}


# One worker: tests/trainer/test_tail.py has it in every run of the suite.
@pytest.mark.long
def test_carried_over_prompts_of_two_workers_survive_a_resume(tiny_model, arithmetic_files, tmp_path):
    assert main(small_run(tiny_model, arithmetic_files, tmp_path, **CARRY, trainer__total_training_steps=3)) == 0
    progress = json.loads((tmp_path / "global_step_3" / "progress.json").read_text())
    # Three steps have learnt from four prompts each; what else was drawn waits.
    assert len(progress["in_flight"]) == 4 * progress["batches_drawn"] - 12
    assert main(small_run(tiny_model, arithmetic_files, tmp_path, **CARRY, trainer__total_training_steps=4)) == 0
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert sum(line["rollout/tail/carried_tokens"] for line in lines[:3]) > 0
    assert lines[3]["rollout/tail/carried_tokens"] > 0, "begun answers go on"
    for line in lines:
        assert line["rollout/tail/prompts_carried_over"] == 3
        assert line["rollout/log_prob_gap/mean"] < 1e-4
        assert all(np.isfinite(value) for value in line.values())
