"""Metrics of the responses to validation prompts."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from rltrain.common.columns import names as c
from rltrain.common.stop import Stop
from rltrain.config.schema import DataConfig
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.runtime.samples import Samples
from rltrain.trainer.validation import Validation, summary_metrics, validation_metrics

NAN = np.nan


def test_a_trajectory_that_could_not_go_on_has_no_score_and_ends_no_validation():
    """This includes the last trajectory, with a number of prompts for which one is left over while all others fill
    their parts."""
    scored = {"score": np.arange(9) % 2.0, "scorer/acc": np.arange(9) % 2.0}
    none, columns = np.zeros, (*c.OF_TURNS, c.NUM_TURNS, c.TOOL_S, c.ANSWER_IMAGES, c.RESPONSE_LENGTH)

    def generate(task):
        samples, n = Samples(len(task.rows)), len(task.rows)
        samples.update({name: none(n) for name in (*columns, c.POLICY_TOKENS)})
        samples.update({c.AGENT_FAILED: task.rows == 7, c.GROUP: np.arange(n), c.TRUNCATED: task.rows < 0})
        return samples, {}

    policy = SimpleNamespace(generate=generate, failure="no server")
    rewards = SimpleNamespace(
        num_rows=lambda split: 9, score=lambda split, samples, at_once: scored | {"reward": scored["score"]}, judged={},
        data_sources=lambda split: ["s"] * 9,
    )  # fmt: skip
    plan = SimpleNamespace(samples_per_step=4, passes=SimpleNamespace(trains=True), num_engine_replicas=0)
    made = Validation(RolloutConfig(), DataConfig(), plan, policy, rewards, "run").run(1, Stop())
    assert made.samples[c.AGENT_FAILED].tolist() == [False] * 7 + [True, False]
    # Three of eight are right; that of the ninth is not known, whatever its scorer has found in the text.
    assert made.metrics["val-aux/s/reward/mean@1"] == made.metrics["val-core/s/acc/mean@1"] == pytest.approx(3 / 8)


def test_names_are_verls_and_only_the_core_is_under_val_core():
    columns = {"reward": np.array([1.0, 0, 0, 0]), "pred": np.array(["a", "b", "b", "b"], dtype=object)}
    metrics = validation_metrics(["s"], columns, 4)
    assert {name for name in metrics if name.startswith("val-core/")} == {
        f"val-core/s/reward/{kind}" for kind in ("mean@4", "best@4/mean", "maj@4/mean")
    }
    pairs = itertools.product(("best", "worst", "maj"), (2, 4), ("mean", "std"))
    aux = {f"{kind}@{k}/{what}" for kind, k, what in pairs} - {"best@4/mean", "maj@4/mean"}
    aux |= {"std@4", "pass@1", "pass@2", "pass@4"}
    assert {name for name in metrics if name.startswith("val-aux/")} == {f"val-aux/s/reward/{kind}" for kind in aux}


def test_every_source_has_its_own_core_variable():
    columns = {"reward": np.array([1.0, 0.0, -1.0, 1.0]), "acc": np.array([NAN, NAN, 0.0, 1.0])}
    metrics = validation_metrics(["openai/gsm8k", "aime24"], columns, 2)
    assert metrics["val-core/openai/gsm8k/reward/mean@2"] == 0.5
    assert metrics["val-core/aime24/acc/mean@2"] == 0.5
    assert metrics["val-aux/aime24/reward/mean@2"] == 0.0
    assert not any("gsm8k/acc" in name for name in metrics)


def every_draw(values, k, reduce):
    """Return mean and standard deviation of ``reduce`` over all k draws with replacement."""
    found = [reduce(draw) for draw in itertools.product(range(len(values)), repeat=k)]
    return np.mean(found), np.std(found)


def test_best_and_worst_are_what_the_bootstrap_tends_to():
    values = np.array([0.3, 1.0, -2.0, 0.3])
    metrics = validation_metrics(["s"], {"reward": values}, 4)
    for k, kind in itertools.product((2, 4), ("best", "worst")):
        reduce = max if kind == "best" else min
        mean, std = every_draw(values, k, lambda draw, reduce=reduce: reduce(values[list(draw)]))
        place = "val-core" if (k, kind) == (4, "best") else "val-aux"
        assert metrics[f"{place}/s/reward/{kind}@{k}/mean"] == pytest.approx(mean)
        assert metrics[f"val-aux/s/reward/{kind}@{k}/std"] == pytest.approx(std)
    assert metrics["val-aux/s/reward/std@4"] == pytest.approx(values.std())


def test_the_majority_is_that_of_drawn_answers():
    values, votes = np.array([1.0, 0.0, 0.0, 0.5]), ["a", "b", "c", "a"]

    def majority(draw):  # the first of the most frequent, as verl counts
        counts = {votes[each]: [votes[one] for one in draw].count(votes[each]) for each in draw}
        winner = max(counts, key=counts.get)
        return next(values[each] for each in draw if votes[each] == winner)

    metrics = validation_metrics(["s"], {"reward": values, "pred": np.array(votes, dtype=object)}, 4)
    for k, place in ((2, "val-aux"), (4, "val-core")):
        mean, std = every_draw(values, k, majority)
        assert metrics[f"{place}/s/reward/maj@{k}/mean"] == pytest.approx(mean, abs=0.03)
        assert metrics[f"val-aux/s/reward/maj@{k}/std"] == pytest.approx(std, abs=0.03)


def test_pass_at_k_is_unbiased_and_only_of_right_or_wrong():
    right = np.array([1.0, 0, 0, 0, 1, 1, 1, 1])
    metrics = validation_metrics(["s", "s"], {"acc": right, "reward": right * 2}, 4)
    for k, expected in ((1, 0.25), (2, 0.5), (4, 1.0)):
        draws = list(itertools.combinations(right[:4], k))
        assert np.mean([any(draw) for draw in draws]) == expected
        assert metrics[f"val-aux/s/acc/pass@{k}"] == pytest.approx((expected + 1) / 2)
    assert "val-aux/s/reward/pass@1" not in metrics


def test_numbers_that_some_rows_lack_are_averaged_over_others():
    columns = {"reward": np.array([1.0, 0, 1, 1]), "acc_algebra": np.array([1.0, 0, NAN, NAN])}
    metrics = validation_metrics(["math", "math"], columns, 2)
    assert metrics["val-aux/math/acc_algebra/mean@2"] == 0.5
    assert metrics["val-aux/math/acc_algebra/best@2/mean"] == 0.75
    # of one prompt, an answer could not be scored
    metrics = validation_metrics(["math"], {"reward": np.ones(2), "acc": np.array([NAN, 0.0])}, 2)
    assert metrics["val-core/math/acc/best@2/mean"] == 0.0
    assert metrics["val-aux/math/acc/pass@2"] == 0.0


def test_the_worst_case_of_a_question_is_that_of_all_its_variants():
    told = [{"id": str(question), "variant": variant} for question in range(3) for variant in range(1, 11)]
    right = np.ones((30, 2))
    right[3, 0] = right[25, 1] = (
        0.0  # one variant of the first question in the first answers, of the last in the second
    )
    metrics = summary_metrics(["dynamath"] * 30, told, {"acc": right.ravel()}, 2)
    assert metrics == {"val-core/dynamath/acc/worst_case": pytest.approx(2 / 3)}
    right[3, 0], right[25, 1] = NAN, NAN  # no verdict, so the question is left out
    assert (
        summary_metrics(["dynamath"] * 30, told, {"acc": right.ravel()}, 2)["val-core/dynamath/acc/worst_case"] == 1.0
    )
    for source, count, metric in (("dynamath", 9, "acc"), ("dynamath", 30, "reward"), ("aime24", 30, "acc")):
        assert summary_metrics([source] * count, told[:count], {metric: np.ones(count)}, 1) == {}


def test_a_composite_problem_is_worth_what_its_parts_say():
    told = [{"id": "3", "key": f"2steps_{part}"} for part in ("1", "2", "multi")]
    three = [{"id": "3", "key": f"3steps_{part}"} for part in ("1", "2", "3", "multi")]
    for right, strict, loose in (((1, 1, 1), 1, 1), ((1, 0, 1), 0, 1), ((0, 0, 1), 0, 0), ((1, 1, 0), 0.5, 0.5)):
        accs = np.array([*right, 1, 1, 1, 1], dtype=float)
        metrics = summary_metrics(["wemath_mini"] * 7, told + three, {"acc": accs}, 1)
        assert {name.rpartition("/")[2]: value for name, value in metrics.items()} == {
            "strict": (strict + 1) / 2, "loose": (loose + 1) / 2,
        }  # fmt: skip
        some = summary_metrics(["wemath_mini"] * 6, (told + three)[:6], {"acc": accs[:6]}, 1)
        assert some["val-core/wemath_mini/acc/strict"] == strict  # the other lacks a part
