"""Steps of estimators over turns: the advantage of each token, and the responses without a baseline."""

import itertools

import numpy as np
import pytest

from rltrain.common.columns import names as c
from rltrain.config.check import broken_rules
from rltrain.config.load import load_config
from tests.algorithms import references as slow
from tests.tiny import small_run
from tests.tiny_tools import save_calling_model, tool_run

R = "actor_rollout_ref__rollout__"
ENVIRONMENT = '''
class Pays:
    """Pays 1, 2, 3, says which turn it was, and ends when it likes a text."""

    def __init__(self):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return f"{self.turns}", float(self.turns), self.turns == 3 or len(text) % 3 == 0
'''
GAMMA = 0.5


@pytest.fixture
def stepped(tmp_path, twisted_trainer, process_group):
    """stepped(estimator, failed, cut): return the samples of a step, and by sample the advantages of its tokens."""

    def step(estimator, failed=(), cut=()):
        model = save_calling_model(tmp_path / "model")
        (tmp_path / "own.py").write_text(ENVIRONMENT)
        run = tool_run(model, tmp_path) | {R + "multi_turn__environment": f"{tmp_path}/own.py:Pays"}
        del run[R + "multi_turn__function_tool_path"]
        masks = {"algorithm__mask_truncated": bool(cut)}
        trainer = twisted_trainer(**run, **masks, algorithm__adv_estimator=estimator, algorithm__gamma=GAMMA)
        collect, spread = trainer.experience.collect, trainer.worker.spread_over_turns
        of_driver, ids, seen = trainer.actor.spread_over_turns, [], []

        def collected(*arguments):
            samples, metrics = collect(*arguments)
            samples[c.AGENT_FAILED][list(failed)] = True
            samples[c.TRUNCATED][:] = np.isin(np.arange(len(samples)), cut)
            return samples, metrics

        def spied(batch, turns):
            made, numbers = spread(batch, turns)
            seen.extend(row.tolist() for row in made.ragged(c.ADVANTAGES).rows())
            return made, numbers

        def told(samples, layout, turns):
            ids.extend(layout.ids[0].tolist())
            return of_driver(samples, layout, turns)

        trainer.experience.collect, trainer.worker.spread_over_turns = collected, spied
        trainer.actor.spread_over_turns = told
        samples = trainer.step(1).samples
        return samples, dict(zip(ids, seen, strict=True))

    return step


def rewards_of(samples, ids):
    rewards = [samples[c.TURN_REWARDS][place].tolist() for place in ids]
    for row, place in zip(rewards, ids, strict=True):
        row[-1] += samples[c.REWARD][place] - sum(row)
    return rewards


def spread(advantages, samples, ids):
    """One number per token, by sample."""
    tokens = [samples[c.TURN_TOKENS][place].tolist() for place in ids]
    return [
        list(itertools.chain(*([value] * count for value, count in zip(row, counts, strict=True))))
        for row, counts in zip(advantages, tokens, strict=True)
    ]


@pytest.mark.parametrize("estimator", ["turn_rloo", "gigpo"])
def test_every_token_gets_the_advantage_of_its_turn_and_a_failed_answer_is_in_no_baseline(stepped, estimator):
    samples, seen = stepped(estimator, failed=[1, 6])
    turns = samples[c.NUM_TURNS]
    assert turns.max() == 3
    assert len(set(turns.tolist())) > 1
    assert [len(row) for row in samples[c.TURN_REWARDS]] == turns.tolist()
    paid = np.concatenate(
        [row for row, count in zip(samples[c.TURN_REWARDS], turns.tolist(), strict=True) if count > 1]
    )
    assert set(paid.tolist()) <= {0.0, 1.0, 2.0, 3.0}
    assert [row.sum() for row in samples[c.TURN_TOKENS]] == samples[c.POLICY_TOKENS].tolist()
    ids = [place for place in range(len(samples)) if place not in (1, 6)]
    rewards, groups = rewards_of(samples, ids), samples[c.GROUP][ids].tolist()
    states = [samples[c.TURN_STATES][place].tolist() for place in ids]
    if estimator == "turn_rloo":
        wanted = slow.turn_rloo(rewards, groups, GAMMA)
    else:
        wanted = slow.gigpo(rewards, groups, states, GAMMA, 1.0)
        # What the environment says is the same for all answers to a prompt, so that their turns are compared.
        assert len({row[1] for row in states if len(row) > 1}) < sum(len(row) > 1 for row in states)
    by_token = spread(wanted, samples, ids)
    assert seen == {place: pytest.approx(row, abs=1e-4) for place, row in zip(ids, by_token, strict=True)}
    means = [np.mean(row) if row else 0.0 for row in by_token]
    assert samples[c.ADVANTAGE][ids] == pytest.approx(means, abs=1e-4)
    assert samples[c.ADVANTAGE][[1, 6]].tolist() == [0.0, 0.0]


def test_a_cut_conversation_is_in_the_baseline_of_the_others_turns_and_has_no_advantage(stepped):
    samples, seen = stepped("turn_rloo", cut=[1, 6])
    ids = range(len(samples))
    by_token = spread(slow.turn_rloo(rewards_of(samples, ids), samples[c.GROUP].tolist(), GAMMA), samples, ids)
    wanted = {place: pytest.approx(row, abs=1e-4) for place, row in enumerate(by_token) if place not in (1, 6)}
    assert seen == wanted
    assert samples[c.ADVANTAGE][[1, 6]].tolist() == [0.0, 0.0]


def settings(tmp_path, **changes):
    changes = {"algorithm__adv_estimator": "turn_rloo"} | changes
    return load_config(small_run(tmp_path, (tmp_path, tmp_path), tmp_path, **changes))


def test_turns_that_nobody_answers_are_not_compared(tmp_path):
    (problem,) = (line for line in broken_rules(settings(tmp_path)) if "turn_rloo" in line)
    assert problem.startswith(
        "algorithm.adv_estimator=turn_rloo compares turns, but there are no tools and no environment. "
    )
    one = settings(tmp_path, algorithm__adv_estimator="gigpo", actor_rollout_ref__rollout__n=1)
    assert any("gigpo compares responses to one prompt" in line for line in broken_rules(one))
