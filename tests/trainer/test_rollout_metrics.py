import numpy as np
import pytest

from rltrain.runtime.samples import Samples
from rltrain.trainer.metrics import generation as g
from rltrain.trainer.metrics import step as m


def generated(ended, engine, lengths, complete=None, served=None) -> Samples:
    samples = Samples(len(ended))
    everything = np.ones(len(ended), dtype=bool)
    samples.update(
        {
            "ended_s": np.array(ended, dtype=float),
            "engine": np.array(engine),
            "response_length": np.array(lengths),
            "policy_tokens": np.array(lengths),
            "prompt_length": np.full(len(ended), 10),
            "complete": everything if complete is None else np.array(complete),
            "served": everything if served is None else np.array(served),
        }
    )
    return samples


def test_the_tail_and_the_idle_time_of_the_replicas():
    # Eleven answers, one a second: 90 % have ended at 10 s. Replica 0 works for 11 s, 1 for 4 s, 2 has nothing to do.
    samples = generated(range(1, 12), [0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0], range(10, 120, 10))
    found = g.rollout_metrics([samples], 3, 4)
    assert found["perf/rollout_tail_s"] == pytest.approx(1.0)
    assert found["perf/rollout_idle_share"] == pytest.approx(1 - (11 + 4) / (3 * 11))
    assert found["rollout/response_length/p50"] == 60
    assert found["rollout/response_length/p90"] == 100
    assert found["rollout/response_length/p99"] == pytest.approx(109)


def test_rounds_add_up():
    first = generated([10.0] * 10 + [20.0], [0] * 10 + [1], [4] * 11)
    second = generated([2.0, 2.0], [0, 1], [8, 8])
    found = g.rollout_metrics([first, second], 2, 4)
    assert found["perf/rollout_tail_s"] == pytest.approx(10.0)
    # 10 of 2 x 20 seconds, and none of 2 x 2.
    assert found["perf/rollout_idle_share"] == pytest.approx(10 / 44)
    assert (found["rollout/response_length/p50"], found["rollout/response_length/p99"]) == (4, 8)


def test_decode_steps_are_the_fewest_that_can_make_the_tokens():
    # Replica 0 makes 21 tokens, two answers at a time: 11 steps; replica 1 one answer of 9.
    found = g.rollout_metrics([generated([1, 2, 3, 4], [0, 0, 0, 1], [5, 10, 6, 9])], 2, 2)
    assert found["perf/decode_steps"] == 11 + 9
    assert found["perf/decode_context_tokens"] == 30 * 10 + (25 + 100 + 36 + 81) / 2


def test_answers_given_up_have_no_length_but_kept_replicas_busy():
    samples = generated([1, 3, 3, 0], [0, 0, 1, 0], [5, 7, 9, 0], [True, True, False, False], [True, True, True, False])
    found = g.rollout_metrics([samples], 2, 4)
    assert found["rollout/response_length/p99"] == pytest.approx(6.98)
    assert found["perf/rollout_idle_share"] == 0


def test_seconds_of_rounds_add_up_and_rates_do_not():
    one = {"timing_s/reshard": 1.0, "reward/compute_s": 2.0, "perf/weight_sync_gb_per_s": 5.0, "rollout/canary_gap": 1}
    other = {"timing_s/reshard": 0.5, "reward/compute_s": 3.0, "perf/weight_sync_gb_per_s": 4.0}
    assert g.join_rounds([one, other]) == {**other, "timing_s/reshard": 1.5, "reward/compute_s": 5.0} | {
        "rollout/canary_gap": 1
    }
    assert g.join_rounds([one]) == one


def test_rates_of_passes_count_what_their_seconds_were_spent_on():
    """Of 240 tokens, 60 were scored after generation, and none of another pass."""
    samples = Samples(2)
    sizes = {"response_length": 100, "policy_tokens": 100, "prompt_length": 20}
    samples.update({name: np.full(2, size) for name, size in sizes.items()})
    phases = ("step", "generate_sequences", "old_log_prob", "ref", "update_actor")
    timing = {f"timing_s/{phase}": 2.0 for phase in phases}
    found = m.throughput_metrics(samples, timing, 1, {"old_log_prob": 60, "ref": 120})
    assert found["perf/old_log_prob_throughput"] == 30
    assert found["timing_per_token_ms/ref"] == 2000 / 120
    assert found["timing_per_token_ms/update_actor"] == 2000 / 240
    nothing = m.throughput_metrics(samples, timing, 1, {"old_log_prob": 0, "ref": 0})
    assert not {"perf/old_log_prob_throughput", "timing_per_token_ms/ref"} & set(nothing)
    # What this step has generated counts, and not what it has used.
    rates = [
        m.throughput_metrics(samples, timing | more, 1, {})["perf/gen_throughput"]
        for more in ({}, {"filter_groups/tokens_thrown_away": 30.0}, {"rollout/tail/tokens_generated": 80.0})
    ]
    assert rates == [100.0, 115.0, 40.0]
