"""Failed trajectories do not change gradients or baselines."""

import numpy as np
import pytest

from rltrain.common.columns import names as c
from rltrain.common.errors import AgentError
from rltrain.runtime.samples import Samples, assemble
from rltrain.trainer.masked_samples import loss_masks, raise_on_failures
from tests.distance import distance
from tests.trainer.steps import Moved

ENTROPY = {"actor_rollout_ref__actor__entropy_coeff": 0.01}
GAE = {"algorithm__adv_estimator": "gae"}
CASES = {
    "grpo": {},
    "grpo, entropy and KL": ENTROPY | {"actor_rollout_ref__actor__use_kl_loss": True},
    "rloo": {"algorithm__adv_estimator": "rloo"},
    "gae": GAE,
    "gae, entropy": GAE | ENTROPY,
    "reinforce_plus_plus": {"algorithm__adv_estimator": "reinforce_plus_plus"},
}


def weights(make, failed_score: float, failed: list[int], **changes):
    """Return the movement of all weights in a step in which these responses have failed, although they have
    this score."""
    trainer = make(**changes)
    collect = trainer.experience.collect

    def collected(*arguments):
        samples, metrics = collect(*arguments)
        scores = np.arange(len(samples)) * 0.37 % 1.0
        scores[[0, 5]] = failed_score
        mask = np.zeros(len(samples), dtype=bool)
        mask[failed] = True
        samples.update({c.SCORE: scores, c.REWARD: scores.copy(), c.RULE_SCORE: scores.copy(), c.AGENT_FAILED: mask})
        return samples, metrics

    trainer.experience.collect = collected
    moved = Moved(trainer)
    metrics = trainer.step(1).metrics
    return moved.by_role(), metrics


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_no_weight_knows_of_an_answer_that_failed(make, case):
    one, metrics = weights(make, 0.0, [0, 5], **CASES[case])
    other, again = weights(make, 50.0, [0, 5], **CASES[case])
    assert distance(one, other) == 0
    assert metrics["critic/score/max"] == again["critic/score/max"] < 1
    assert metrics["actor/grad_norm"] > 0
    # They would be learnt from.
    low, _ = weights(make, 0.0, [], **CASES[case])
    high, _ = weights(make, 50.0, [], **CASES[case])
    assert distance(low, high) > 1e-3
    assert distance(one, low) > 1e-3


def samples(groups: list[int], failed: list[int]) -> Samples:
    made = Samples(len(groups))
    mask = np.zeros(len(groups), dtype=bool)
    mask[failed] = True
    made.update({c.GROUP: np.array(groups), c.AGENT_FAILED: mask})
    return made


def test_an_answer_with_nothing_to_be_compared_with_is_left_out_too():
    made = samples([0, 0, 1, 1, 1, 2], [0, 2])
    for compares, second in ((True, True), (False, False)):
        both = loss_masks(made, compares=compares)
        assert [both[name].tolist() for name in (c.MASKED, c.EXCLUDED_FROM_BASELINE)] == [
            [True, second, True, *[False] * 3]
        ] * 2


def test_more_than_half_end_the_run_and_say_why(tmp_path):
    raise_on_failures(samples([0, 0, 1, 1], [0, 2]), "no server", tmp_path)
    with pytest.raises(AgentError, match=r"3 of 4 trajectories failed\. The first: no server$") as refusal:
        raise_on_failures(samples([0, 0, 1, 1], [0, 2, 3]), "no server", tmp_path)
    assert refusal.value.exit_code == 75


@pytest.mark.parametrize(
    ("error", "failed", "code"),
    [
        ("KeyError: 'question'", [0, 1, 2], 1),
        ("my_agent.Wrong", [0, 1, 2], 1),
        ("KeyError: 'question'", [0, 1], 75),
        ("httpx.ConnectError: no route", [0, 1, 2], 75),
        ("ConnectionRefusedError: [Errno 111]", [0, 1, 2], 75),
    ],
)
def test_a_bug_of_an_agent_that_ends_every_trajectory_is_no_reason_to_run_again(tmp_path, error, failed, code):
    (tmp_path / "agents.log").write_text("a line")
    failure = f'Traceback (most recent call last):\n  File "agent.py", line 3, in run\n{error}'
    with pytest.raises(AgentError) as refusal:
        raise_on_failures(samples([0, 0, 0], failed), failure, tmp_path)
    assert refusal.value.exit_code == code
    assert f"is in {tmp_path / 'agents.log'}." in str(refusal.value)


def test_failed_trajectories_are_in_the_mean_of_neither_score_nor_entropy(make):
    trainer = make(actor_rollout_ref__actor__top_entropy_quantile=0.5)
    generate = trainer.actor.generate

    def failing(task, *rest):
        answers, metrics = generate(task, *rest)
        answers.update({c.AGENT_FAILED: np.arange(len(answers)) < 2})
        return answers, metrics

    trainer.actor.generate = failing
    answered = trainer.step(1)
    request = answered.samples.request(np.arange(2, len(answered.samples)), [c.ENTROPY])
    entropy = assemble(request, [part.ref for part in request.parts]).ragged(c.ENTROPY).values
    assert answered.metrics["actor/entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)
    assert answered.metrics["critic/score/mean"] == pytest.approx(answered.samples[c.SCORE][2:].mean())


def test_a_greedy_answer_that_failed_is_no_baseline(make):
    trainer = make(algorithm__adv_estimator="remax")
    generate = trainer.actor.generate

    def failing(task, *rest):
        answers, metrics = generate(task, *rest)
        if not task.is_learnt_from:
            failed = np.zeros(len(answers), dtype=bool)
            failed[1] = True
            answers.update({c.AGENT_FAILED: failed})
        return answers, metrics

    trainer.actor.generate = failing
    answered = trainer.step(1).samples
    n = len(answered) // 4
    assert answered[c.MASKED].tolist() == [place == 1 for place in range(4) for _ in range(n)]
    assert (answered[c.ADVANTAGE][n : 2 * n] == 0).all()
