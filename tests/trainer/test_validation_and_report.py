import json
import resource

import numpy as np
import pytest

from rltrain.common.errors import DataError, DiskError
from rltrain.run.previous_attempt import append_last_line
from rltrain.run.report.table import learning_summary, phase_table, read_metrics, report
from rltrain.run.report.tracking import JsonLines
from rltrain.trainer.batching.balance import Layout, Workload, cost_of
from rltrain.trainer.metrics.timing import decode_metrics, flops_metrics


def lines(count: int) -> list[dict]:
    return [
        {"step": i, "timing_s/step": 2.0 + i, "timing_s/gen": 1.0, "critic/score/mean": i / 10}
        for i in range(1, count + 1)
    ]


def test_the_table_leaves_out_the_first_step_of_several():
    table = phase_table(lines(3))
    assert "Mean of 2 of 3 steps" in table
    assert any(row.split()[:2] == ["step", "4.500000"] for row in table.splitlines())


def test_learning_summary_compares_start_and_end():
    assert "0.100 (first step) -> 0.400 (last step)" in learning_summary(lines(4))
    assert "0.150 (first 2 steps) -> 1.950 (last 2 steps)" in learning_summary(lines(20))
    assert learning_summary(lines(1)) == "training reward: 0.100 (one step)"


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([(-1, -1)], "every response earned -1; show them"),
        ([(-0.5, -0.1), (-1, 0)], "no response earned more than 0; show them"),
        ([(0, 0), (0, 1)], ""),
        ([(-3.5, -0.25), (-2, -1)], ""),  # a reward model's
    ],
)
def test_a_run_in_which_nothing_was_earned_ends_with_where_to_look(ends, said, tmp_path):
    of_run = [lines(1)[0] | {"critic/score/min": low, "critic/score/max": high} for low, high in ends]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in of_run))
    last = report(tmp_path).splitlines()[-1]
    assert last.startswith(said or "training reward: ")
    assert (f"rltrain.view {tmp_path} --worst (this run saved none" in last) == bool(said)


@pytest.mark.parametrize(
    ("truncated", "scores", "said"),
    [
        ((0.6, 0.74), (0.5, 0.4), "74% of the responses of the last step were truncated: raise data.max_response"),
        (
            (0.0, 0.2),
            (0.1, 0.4),
            "20% of the responses of the last step were truncated: it was 0% at the start and rose",
        ),
        ((0.0, 0.2), (0.4, 0.4), "training reward: "),
        ((0.2, 0.2), (0.1, 0.4), "training reward: "),
    ],
)
def test_a_run_that_ends_truncated_says_so(truncated, scores, said, tmp_path):
    values = zip(truncated, scores, strict=True)
    of_run = [{"response_length/clip_ratio": share, "critic/score/mean": score} for share, score in values]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in of_run))
    assert report(tmp_path).splitlines()[-1].startswith(said)


def test_a_report_of_validation_alone_speaks_of_no_steps(tmp_path):
    with pytest.raises(DataError, match="Give the run folder"):
        report(tmp_path)
    line = {"step": 0, "val-core/gsm8k/acc/mean@1": 0.825, "timing_s/testing": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    text = report(tmp_path)
    assert text.splitlines()[0] == "No training step"
    assert any(row.split() == ["testing", "2.000000", "seconds"] for row in text.splitlines())
    assert text.splitlines()[-1] == "val-core/gsm8k/acc/mean@1: 0.825"


@pytest.mark.fault("A metrics.jsonl that cannot be written is told once, and its lines come later")
def test_lines_that_cannot_be_written_come_later(tmp_path, caplog):
    file = tmp_path / "metrics.jsonl"
    # Larger than what the tests themselves write while the limit holds.
    file.write_text(json.dumps({"step": 1, "x": "0" * 2**22}) + "\n")
    writer = JsonLines(file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, hard))
    try:
        writer.log(2, {"x": 2.0})
        writer.log(3, {"x": 3.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_text().splitlines()[1] == '{"step": 2'
    writer.log(4, {"x": 4.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert caplog.text.count("metrics.jsonl cannot be written (") == 1


def test_lines_that_never_come_are_counted_at_the_end(tmp_path, caplog):
    file = tmp_path / "metrics.jsonl"
    writer = JsonLines(file)
    file.unlink()
    file.mkdir()
    # None of these may raise: they run while an error is on its way.
    writer.log(1, {"x": 1.0})
    writer.log(2, {"x": 2.0})
    writer.close()
    assert "metrics.jsonl lacks its last 2 lines: [Errno 21]" in caplog.text
    for use in (lambda: JsonLines(file), lambda: append_last_line(file, 2, {"x": 1.0})):
        with pytest.raises(DiskError, match=r"metrics\.jsonl cannot be written"):
            use()


def test_flops_by_hand_and_mfu_only_where_the_peak_is_known():
    model = {"matmul_parameters": 1000, "trained_parameters": 1200, "attention_width": 8, "peak_flops": 1e6}
    work = Workload.of_groups(np.array([10, 20]), np.array([30, 20]), np.arange(2), pair_cost=2 * 8 / 1000)
    costs = {"update_actor": cost_of(Layout([np.arange(2)], [[(2,)]]), work)}
    seconds = {"timing_s/update_actor": 2.0}
    # 80 tokens, both sequences 40 long: 6 * 1000 * 80 + 6 * 8 * 2 * 1600 FLOPs in 2 s on 4 devices
    rate = (480_000 + 153_600) / (2 * 4)
    found = flops_metrics(costs, seconds, model, 4)
    assert found["perf/mfu/actor"] == found["perf/mfu/actor_prompts_repeated"] == pytest.approx(rate / 1e6)
    # LoRA: weight gradients of 10 parameters alone
    found = flops_metrics(costs, seconds, model | {"trained_parameters": 10}, 4)["perf/mfu/actor"]
    assert found == pytest.approx((321_600 + 153_600) / (2 * 4 * 1e6))
    unknown = flops_metrics(costs, seconds, {name: each for name, each in model.items() if name != "peak_flops"}, 4)
    assert unknown == {"perf/tflops/actor": pytest.approx(rate / 1e12)}
    # a forward over half of the tokens and pairs
    half = {"old_log_prob": cost_of(Layout([np.array([0])], [[(1,)]]), work)}
    found = flops_metrics(half, {"timing_s/old_log_prob": 1.0}, model, 4)
    assert found["perf/mfu/actor_infer"] == pytest.approx((80_000 + 25_600) / (4 * 1e6))


def test_a_shared_prompt_counts_once_or_for_every_answer():
    model = {"matmul_parameters": 1000, "trained_parameters": 1000, "attention_width": 8, "peak_flops": 1e6}
    model |= {"critic_matmul_parameters": 500, "critic_trained_parameters": 500, "critic_attention_width": 4}
    work = Workload.of_groups(np.array([100] * 2), np.array([20] * 2), np.zeros(2, dtype=int), pair_cost=2 * 8 / 1000)
    cost = cost_of(Layout([np.arange(2)], [[(2,)]]), work)
    found = flops_metrics({"ref": cost, "values": cost}, {"timing_s/ref": 1.0, "timing_s/values": 1.0}, model, 1)
    # 4 FLOPs per pair and width: 100^2 / 2 pairs in a prompt, 20 x 100 + 20^2 / 2 in an answer
    once, repeated = 2000 * 140 + 32 * (5000 + 2 * 2200), 2000 * 240 + 32 * 2 * (5000 + 2200)
    assert found["perf/mfu/ref"] == pytest.approx(once / 1e6)
    assert found["perf/mfu/ref_prompts_repeated"] == pytest.approx(repeated / 1e6)
    # A critic of half the width and half the weights takes half.
    assert found["perf/mfu/critic_infer"] == pytest.approx(once / 2e6)
    assert found["perf/tflops/ref"] == pytest.approx(once / 1e12)


def test_decode_reads_weights_once_a_step_and_every_context():
    sizes = {"peak_bandwidth": 1e6, "decode_bytes": 2000.0, "cache_bytes_per_token": 64.0}
    metrics = {"perf/decode_steps": 10.0, "perf/decode_context_tokens": 500.0, "timing_s/generate_sequences": 0.5}
    read = 10 * 2000 + 500 * 64
    assert decode_metrics(metrics, sizes, 2) == {"perf/mbu/rollout": pytest.approx(read / (0.5 * 2 * 1e6))}
    assert decode_metrics(metrics, sizes | {"peak_bandwidth": 0}, 2) == {}
