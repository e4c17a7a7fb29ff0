"""Metrics of a step about its responses and rewards."""

import numpy as np
import pytest

from rltrain.common.columns import names as c
from rltrain.runtime.samples import Samples
from rltrain.trainer.metrics import generation as g
from rltrain.trainer.metrics import step as m
from rltrain.trainer.rewards import accuracy
from rltrain.workers.interface.results import WAIT, GenerationNumbers, UpdateNumbers

NAN = np.nan


def samples_of(n: int, **columns) -> Samples:
    samples = Samples(n)
    zeros = dict.fromkeys(("reward_failed", "reward_timeout"), np.zeros(n))
    columns = {"truncated": np.zeros(n, dtype=bool), "group": np.arange(n) // 2, **zeros, **columns}
    samples.update({name: np.asarray(values) for name, values in columns.items()})
    return samples


def reward_metrics(samples: Samples, weighted: bool = False):
    return m.reward_metrics(samples, accuracy(samples), weighted=weighted)


def test_groups_are_all_right_all_wrong_or_mixed():
    scores = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    found = reward_metrics(samples_of(8, score=scores, reward=scores))
    assert found["reward/groups_all_right"] == 0.25
    assert found["reward/groups_all_wrong"] == 0.5
    assert found["reward/groups_mixed"] == 0.25
    assert found["reward/std"] == 0.5 / 4


def test_right_is_what_acc_says_where_it_is_given():
    scores, acc = np.array([-1.0, 0.9, 1, 1]), np.array([0.0, 0, 1, NAN])
    found = reward_metrics(samples_of(4, score=scores, reward=scores, **{"scorer/acc": acc}))
    assert [found[f"reward/groups_{kind}"] for kind in ("all_right", "all_wrong", "mixed")] == [0.5, 0.5, 0.0]
    assert found["reward/std"] == pytest.approx(0.95 / 2)


def test_parts_of_the_loss_and_the_norm_are_means_over_the_steps_that_were_made():
    steps = np.array([4.0, 7.0, 0.0, 2.0])
    number = UpdateNumbers(
        grad_norm=steps, skipped=np.array([0.0, 0, 0, 1]), overflowed=np.zeros(4), shares={"loss": steps}, token_sums={}
    )
    found = m.update_metrics([number, number], np.array([0, 3, 0, 3]), np.array([5, 5, 0, 5]), "actor")
    # The third mini-batch has no token that counts, the fourth was skipped; the first has no gradient, and counts.
    assert (found["actor/grad_norm"], found["actor/loss"], found["actor/steps_skipped"]) == (5.5, 11.0, 1.0)


def test_every_number_of_the_scorer_is_averaged_in_training_too():
    columns = {"acc": [1.0, NAN], "format": [1.0, 0], "empty": [NAN, NAN], "pred": np.array(["a", "b"], dtype=object)}
    columns = {f"scorer/{name}": values for name, values in columns.items()}
    samples = samples_of(2, score=[1.0, 0], reward=[1.0, 0], rule_score=[1.0, 0], **columns)
    found = reward_metrics(samples)
    means = {name: value for name, value in found.items() if name.endswith("/mean")}
    assert means == {"reward/acc/mean": 1.0, "reward/format/mean": 0.5}
    assert reward_metrics(samples, weighted=True)["reward/rule/mean"] == 0.5


def test_the_error_of_a_mean_score_is_that_of_the_means_of_prompts():
    """Responses to one prompt are correlated, so more of them do not make the mean more accurate."""
    scores = [1.0, 0, 1, 1, 0, 0]  # means 0.5, 1, 0: their deviation 0.5, over the root of three prompts
    samples = samples_of(6, score=scores, reward=scores, group=[0, 0, 1, 1, 2, 2], response_length=[1] * 6,
                         prompt_length=[1] * 6)  # fmt: skip
    assert m.sample_metrics(samples, 8)["critic/score/sem"] == pytest.approx(0.5 / np.sqrt(3))
    one = samples_of(2, score=[0.0, 1], reward=[0.0, 1], group=[0, 0], response_length=[1, 1], prompt_length=[1, 1])
    assert "critic/score/sem" not in m.sample_metrics(one, 8)


def test_answers_without_a_token_are_told_apart():
    samples = samples_of(2, score=[0.0, 1], reward=[0.0, 1], response_length=[0, 4], prompt_length=[3, 3])
    found = m.sample_metrics(samples, 8)
    assert found["response/aborted_ratio"] == 0.5
    assert (found["response_length/mean"], found["response_length_non_aborted/mean"]) == (2.0, 4.0)


def test_every_answer_of_several_turns_has_ended_for_one_reason():
    columns = {name: np.zeros(5) for name in c.OF_TURNS} | {c.NUM_TURNS: np.array([1, 3, 3, 2, 3])}
    columns |= {c.TOOL_S: np.zeros(5), c.POLICY_TOKENS: np.ones(5), c.RESPONSE_LENGTH: np.ones(5)}
    columns |= {c.ANSWER_IMAGES: np.zeros(5)}
    # By itself; with the third turn of three; cut off in it; for want of room; failed, whatever else it was.
    columns |= {c.TRUNCATED: np.array([0, 0, 1, 1, 1]) > 0, c.AGENT_FAILED: np.array([0, 0, 0, 0, 1]) > 0}
    samples = samples_of(5, **columns)

    def stops(most_turns):
        found = m.turn_metrics(samples, most_turns)
        return [round(5 * found[f"agent/stop/{why}"]) for why in ("answered", "turns", "length", "failed")]

    assert stops(3) == [1, 1, 2, 1]
    assert stops(None) == [2, 0, 2, 1]


def test_the_share_of_waiting_is_of_all_rounds_and_replicas():
    def of_round(*seconds):
        ranks = [GenerationNumbers({"reshard": 0, "generate_sequences": s, WAIT: waited}) for waited, s in seconds]
        return g.generation_metrics(ranks)

    joined = g.join_rounds([of_round((1, 4), (0, 4)), of_round((5, 8), (6, 8))])
    assert joined["perf/rollout_wait_share"] == (1 + 0 + 5 + 6) / (4 + 4 + 8 + 8)
    assert "perf/rollout_wait_share" not in g.join_rounds([g.generation_metrics([GenerationNumbers(dict.fromkeys(
        ("reshard", "generate_sequences"), 1.0))])])  # fmt: skip
