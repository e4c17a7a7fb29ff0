import json

import numpy as np
import pytest

from rltrain.errors import DataError
from rltrain.report import learning_summary, phase_table, read_metrics, report
from rltrain.trainer.balance import Workload
from rltrain.trainer.metrics import flops_metrics
from rltrain.trainer.tracking import JsonLines
from rltrain.trainer.validation import validation_metrics


def test_mean_best_and_worst_over_n_answers_for_each_source():
    numbers = {
        "reward": np.array([1.0, 0.0, 0.0, 0.0, 0.5, 0.5]),
        "format": np.array([1.0, 1.0, 1.0, 1.0, np.nan, np.nan]),
    }
    metrics = validation_metrics(["a", "a", "b"], numbers, 2)
    assert metrics["val-core/a/reward/mean@2"] == 0.25
    assert metrics["val-core/a/reward/best@2"] == 0.5
    assert metrics["val-core/a/reward/worst@2"] == 0.0
    assert metrics["val-core/b/reward/mean@2"] == 0.5
    assert metrics["val-aux/a/format/mean@2"] == 1.0
    assert "val-aux/b/format/mean@2" not in metrics


def test_acc_is_the_core_variable_where_a_scorer_gives_it():
    metrics = validation_metrics(["a"], {"reward": np.array([-1.0]), "acc": np.array([0.0])}, 1)
    assert metrics == {"val-aux/a/reward/mean@1": -1.0, "val-core/a/acc/mean@1": 0.0}


def lines(count: int) -> list[dict]:
    return [
        {"step": i, "timing_s/step": 2.0 + i, "timing_s/gen": 1.0, "critic/score/mean": i / 10}
        for i in range(1, count + 1)
    ]


def test_a_column_of_some_rows_only_is_averaged_over_those():
    numbers = {"reward": np.array([1.0, 0.0, 1.0, 1.0]), "acc_algebra": np.array([1.0, 0.0, np.nan, np.nan])}
    metrics = validation_metrics(["math", "math"], numbers, 2)
    assert metrics["val-aux/math/acc_algebra/mean@2"] == 0.5
    assert metrics["val-aux/math/acc_algebra/best@2"] == 1.0


def test_the_table_leaves_out_the_first_step_of_several():
    table = phase_table(lines(3))
    assert "Mean of 2 of 3 steps" in table
    assert any(row.split()[:2] == ["step", "4.500000"] for row in table.splitlines())


def test_learning_summary_compares_start_and_end():
    assert "0.100 (first 1 steps) -> 0.400 (last 1 steps)" in learning_summary(lines(4))


def test_a_resumed_run_drops_the_lines_after_the_resumed_step(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4)) + '{"step": 5, "trunc')
    writer = JsonLines(file, resumed_step=2)
    writer.log(3, {"x": 1.0})
    writer.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_fresh_run_starts_its_own_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    JsonLines(tmp_path / "metrics.jsonl", resumed_step=0).close()
    assert read_metrics(tmp_path) == []


def test_a_report_of_nothing_says_what_to_give(tmp_path):
    with pytest.raises(DataError, match="Give the run folder"):
        report(tmp_path)


def test_mfu_by_hand_and_only_where_the_peak_is_known():
    model = {"matmul_parameters": 1000, "trained_parameters": 1200, "attention_width": 8, "peak_flops": 1e6}
    work = Workload.of_groups(np.array([10, 20]), np.array([30, 20]), np.arange(2), pair_cost=2 * 8 / 1000)
    cost, seconds = work.cost(np.arange(2)), {"timing_s/update_actor": 2.0}
    # 80 tokens, both sequences 40 long: 6 * 1000 * 80 + 6 * 8 * 2 * 1600 FLOPs in 2 s on 4 devices
    found = flops_metrics(cost, 80, seconds, model, 4)["perf/mfu/actor"]
    assert found == pytest.approx((480_000 + 153_600) / (2 * 4 * 1e6))
    # LoRA: weight gradients of 10 parameters alone
    found = flops_metrics(cost, 80, seconds, model | {"trained_parameters": 10}, 4)["perf/mfu/actor"]
    assert found == pytest.approx((321_600 + 153_600) / (2 * 4 * 1e6))
    assert flops_metrics(cost, 80, seconds, model | {"peak_flops": None}, 4) == {}
