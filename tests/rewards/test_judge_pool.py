"""A judge in the pool of a run: its deadline per step, failed judgements, and its costs."""

import numpy as np
import pytest

from rltrain.common.errors import JudgeError, RewardError
from rltrain.config.schema.judge import JudgeConfig
from tests.clock import eventually
from tests.doubles.judge import HANG

YES = "\\boxed{yes}"


def begun(pool, ray, texts):
    scoring = pool.begin_scoring("train", len(texts))
    scoring.add(ray.put(texts), np.arange(len(texts)), np.arange(len(texts)))
    return scoring


def test_a_step_waits_for_the_judge_no_longer_than_it_may(local_ray, double, pool, rows, monkeypatch):
    judge = double(lambda message, _: HANG if "slow" in message else YES)
    monkeypatch.setenv("LATE_KEY", "sk-of-this-run")  # after Ray has started
    keys = {"deadline_s": 5, "max_concurrency": 4, "max_tokens_total": 100, "api_key_env": "LATE_KEY"}
    made = pool(rows, num_workers=1, judge=JudgeConfig(url=judge.url, model="grader", **keys))
    assert [score.value for score in made.score_truths("train")] == [1.0]
    assert judge.headers[-1]["Authorization"] == "Bearer sk-of-this-run"
    scoring = made.begin_scoring("train", 11)
    scoring.add(local_ray.put([*"abcdef"]), np.arange(6), np.arange(6))
    eventually(lambda: scoring.advance() or len(judge.requests) == 7, "the quick ones are judged before the step waits")
    scoring.add(local_ray.put(["slow"] * 5), np.arange(5), np.arange(5))  # of which one waits for its turn
    columns = scoring.collect()
    assert columns["reward_failed"].tolist() == columns["reward_timeout"].tolist() == [0] * 6 + [1] * 5
    assert columns["score"].tolist() == [1] * 6 + [-2] * 5  # reward.on_error
    assert columns["scorer/judge"][:2].tolist() == [1.0, 1.0]
    assert "reward.judge.deadline_s" in columns["reward_error"][-1]
    assert (scoring.judged["calls"], scoring.judged["tokens"]) == (10, 60)  # all but the one that waits
    assert judge.busiest == 4
    # The next step is judged as usual. 10 tokens for the trial, 60 and 20 until now.
    assert begun(made, local_ray, ["f", "g"]).collect()["score"].tolist() == [1.0, 1.0]
    with pytest.raises(RewardError, match=r"used 110 tokens .*max_tokens_total=100 is the limit"):
        begun(made, local_ray, ["h", "i"]).collect()


def test_nonsense_for_most_answers_ends_the_run_as_what_may_pass(local_ray, double, pool, rows):
    judge = double(lambda message, _: YES if "fine" in message else "What a nice day.")
    made = pool(rows, num_workers=2, judge=JudgeConfig(url=judge.url, model="grader", max_concurrency=4))
    columns = begun(made, local_ray, ["x", "fine", "y", "fine"]).collect()
    assert columns["reward_failed"].tolist() == [1, 0, 1, 0]
    assert columns["reward_timeout"].sum() == 0
    with pytest.raises(JudgeError, match=r"reward\.judge fails on more than half of a batch \(at least 3 of 4: 3 rej"):
        begun(made, local_ray, ["x", "y", "z", "fine"]).collect()
    assert JudgeError.exit_code == 75
    with pytest.raises(RewardError, match="gives no score for data_source='mine'"):
        made.score_truths("train")
