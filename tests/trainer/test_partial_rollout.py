"""Steps that end before the longest responses: their training samples, the continued responses, and their log-probs."""

import json
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from rltrain.common.errors import ConfigError
from rltrain.common.stop import Stop
from rltrain.data.images import EncodedPrompt
from rltrain.rewards.scorers.registry import find_scorer
from rltrain.runtime.samples import Samples, assemble, whole
from rltrain.trainer.partial_rollout import PendingPrompts, Prompt
from tests.batches import prompt_lengths, rows_of
from tests.distance import distance

pytestmark = pytest.mark.usefixtures("process_group")

ROLLOUT = "actor_rollout_ref__rollout__"
CORRECTION = "algorithm__rollout_correction__"
IS = CORRECTION + "rollout_is"
BYPASS = CORRECTION + "bypass_mode"
OVERSAMPLE = {ROLLOUT + "tail": "oversample", ROLLOUT + "oversample_ratio": 1.5}
CARRY = {ROLLOUT + "tail": "carry_over", ROLLOUT + "oversample_ratio": 1.5, IS: "token"}
MODES = {
    "oversample": OVERSAMPLE,
    "carry_over": CARRY,
    # Groups end in parts, and some prompts are never begun.
    "carry_over in jobs": CARRY | {ROLLOUT + "max_num_seqs": 8},
}


@pytest.fixture
def make(tiny_trainer):
    """make(**changes): return a trainer with responses of 1 to 20 tokens."""
    return lambda **changes: tiny_trainer(**({"data__max_response_length": 20} | changes))


class Watch:
    """Records what every step starts, what the engine samples with which policy, and the batch."""

    def __init__(self, trainer) -> None:
        self.experience, self.engine = trainer.experience, trainer.worker.rollout.engine
        self.step = 0
        self.batches: list[Samples] = []
        self.keys: list[list[tuple[int, int, int]]] = []  # (row, draw, sample) of each answer of each batch
        self.log_probs: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        self.tokens: dict[tuple[int, int, int], list[int]] = {}
        self.born: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # step in which each token was sampled
        policy, pending = trainer.actor, self.experience.pending
        self._generate, policy.generate = policy.generate, self.generate
        self._collect, pending.collect_complete = pending.collect_complete, self.collect_complete

    def generate(self, task, listener=None, begun=None):
        samples, metrics = self._generate(task, listener, begun)
        n, steps = task.num_samples, np.broadcast_to(task.step, len(task.rows))
        ids = np.flatnonzero(samples["served"])
        found = columns(samples, ids, ["prompt", "response"])
        for number, row in zip(ids.tolist(), rows_of(found), strict=True):
            key = (int(task.rows[number // n]), int(steps[number // n]), number % n)
            head = int(samples["prompt_length"][number])
            if task.pending_mask is None:  # every attempt starts anew
                self.tokens[key], self.log_probs[key], self.born[key] = [], [], []
            answer, before = row[head:].tolist(), self.tokens.get(key, [])
            assert answer[: len(before)] == before
            self.tokens[key] = answer
            of_text = self.engine.log_probs(EncodedPrompt(row.numpy()))
            self.log_probs[key] += of_text[head - 1 :][len(before) :].tolist()
            self.born[key] += [self.step] * (len(answer) - len(before))
        return samples, metrics

    def collect_complete(self, started, samples):
        batch, ids, metrics = self._collect(started, samples)
        self.batches.append(batch)
        self.keys.append([(started[i // 4].row, started[i // 4].draw, i % 4) for i in ids.tolist()])
        self.step += 1
        return batch, ids, metrics


def columns(samples, ids, names):
    request = samples.request(np.asarray(ids), names)
    return assemble(request, [part.ref for part in request.parts])


ALWAYS = ("oversample", "carry_over", "carry_over in jobs")


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode in ALWAYS else pytest.mark.long) for mode in MODES]
)
def test_every_drawn_prompt_is_in_one_batch_or_in_the_line(make, mode):
    trainer = make(**MODES[mode])
    watch, pending, sampler = Watch(trainer), trainer.experience.pending, trainer.experience.sampler
    left_over = 0.0
    for step in range(1, 7):
        metrics = trainer.step(step).metrics
        left_over += metrics[f"rollout/tail/prompts_{'carried_over' if 'carry' in mode else 'thrown_away'}"]
        drawn = Counter(
            (row, draw + 1) for draw in range(trainer.experience.batches_drawn) for row in sampler.rows(draw)
        )
        used = Counter(key[:2] for keys in watch.keys for key in keys[::4])
        assert used + Counter((row, draw) for row, draw, _ in pending.state()) == drawn
    assert left_over >= 6, "steps must have ended early"
    for batch, keys in zip(watch.batches, watch.keys, strict=True):
        assert len(batch) == 16
        assert batch["complete"].all()
        assert batch["row"].tolist() == [row for row, _, _ in keys]
        assert [sample for *_, sample in keys] == [0, 1, 2, 3] * 4
        found = columns(batch, np.arange(16), ["prompt", "response", "rollout_log_probs", "text"])
        for key, row, log_probs, text, head, score in zip(
            keys, rows_of(found), found.ragged("rollout_log_probs").rows(), found["text"], prompt_lengths(found),
            batch["score"].tolist(), strict=True,
        ):  # fmt: skip
            assert row[head:].tolist() == watch.tokens[key]
            assert distance(log_probs, torch.tensor(watch.log_probs[key])) < 1e-5, "of whoever sampled the token"
            assert text == trainer.worker.rollout.encoder.decode_batch([row[head:]])[0]
            prompt = trainer.data.rows["train"][key[0]]
            verdict = find_scorer(prompt.data_source)(text, prompt.ground_truth, prompt.extra_info)
            assert score == (verdict["score"] if isinstance(verdict, dict) else verdict)


def test_carried_tokens_are_weighed_by_the_policy_s_move(make):
    threshold = "algorithm__rollout_correction__rollout_is_threshold"
    trainer = make(**CARRY, **{threshold: "1.05", "actor_rollout_ref__actor__optim__lr": 0.003,
                               "actor_rollout_ref__actor__recompute_old_log_prob": "always"})  # fmt: skip
    watch = Watch(trainer)
    for step in range(1, 6):
        metrics = trainer.step(step).metrics
        batch, keys = watch.batches[-1], watch.keys[-1]
        found = columns(batch, np.arange(16), ["old_log_probs", "rollout_log_probs", "is_weights"])
        old, sampled, weights = (found.ragged(name) for name in ("old_log_probs", "rollout_log_probs", "is_weights"))
        assert torch.allclose(weights.values, (old.values - sampled.values).exp().clamp(max=1.05))
        age = step - 1 - torch.tensor([born for key in keys for born in watch.born[key]])
        fresh = weights.values[age == 0]
        assert distance(fresh, torch.ones_like(fresh)) < 1e-4
        assert metrics["rollout/tail/carried_tokens"] == int((age > 0).sum())
        assert metrics["rollout/tail/carried_samples"] == sum(watch.born[key][0] < step - 1 for key in keys)
        assert metrics["rollout/tail/staleness/mean"] == pytest.approx(float(age.float().mean()))
        assert metrics["rollout/tail/staleness/max"] == int(age.max())
        assert metrics["rollout/log_prob_gap/mean"] < 1e-5, "the gap is that of the engine, not of the age"
        if step > 1:
            assert float((weights.values[age > 0] - 1).abs().max()) > 1e-3
            assert metrics["rollout/tail/carried_samples"] > 0


def test_bypass_takes_the_ratio_against_who_sampled_the_token(make):
    trainer = make(**(CARRY | {IS: "null", BYPASS: True}))
    carried = [trainer.step(step).metrics for step in range(1, 5)][1:]
    assert all(metrics["rollout/log_prob_gap/mean"] < 1e-4 for metrics in carried)
    assert max(metrics["rollout_corr/kl"] for metrics in carried) != pytest.approx(0, abs=1e-6)


# What is carried over is what is thrown away, and more.
BOTH = [pytest.param("oversample", marks=pytest.mark.long), "carry_over"]


@pytest.mark.parametrize("mode", BOTH)
def test_a_prompt_keeps_its_random_numbers_in_every_attempt(make, mode):
    """A long response is not replaced by a shorter one: an unchanged policy gives the responses of a plain run."""
    still = {"actor_rollout_ref__actor__optim__lr": 0.0}
    watch, plain = Watch(trainer := make(**MODES[mode], **still)), Watch(other := make(**still))
    for step in range(1, 6):
        trainer.step(step)
        other.step(step)
    done = {key for keys in watch.keys for key in keys} & plain.tokens.keys()
    assert len(done) >= 48
    assert all(watch.tokens[key] == plain.tokens[key] for key in done)
    again = Counter(key for keys in watch.keys for key in keys)
    assert max(again.values()) == 1


@pytest.mark.parametrize("mode", BOTH)
def test_no_prompt_is_older_than_the_cap(make, mode):
    trainer = make(**MODES[mode], **{ROLLOUT + "tail_max_age": 1})
    watch, pending = Watch(trainer), trainer.experience.pending
    for step in range(1, 6):
        waiting = [(row, draw) for row, draw, age in pending.state() if age]
        metrics = trainer.step(step).metrics
        assert set(waiting) <= {key[:2] for key in watch.keys[-1]}, "all that were left over once are waited for"
        assert metrics["rollout/tail/age_max"] == (1.0 if waiting else 0.0)
    assert trainer.experience.pending.state()


def samples_of(complete: list[list[bool]], length: int = 3, unserved: tuple[int, ...] = ()) -> Samples:
    """Return samples; incomplete ones were aborted after ``length`` tokens. unserved: those that no engine
    has started."""
    flat = np.array(complete).ravel()
    served = ~np.isin(np.arange(len(flat)), unserved)
    samples = Samples(len(flat))
    samples.update({"complete": flat, "served": served, "response_length": length * served,
                    "policy_tokens": length * served, "loss_tokens": length * served, "group": np.zeros(len(flat), int),
                    "truncated": ~flat & False, "prompt_length": np.full(len(flat), 2),
                    "engine": np.zeros(len(flat), int),
                    "row": np.arange(len(flat))})  # fmt: skip
    ids = np.flatnonzero(served)
    samples.attach([whole([f"{length}:{i}" for i in ids], ("response", "text"), ids)])
    return samples


def pending_of(make, **changes) -> PendingPrompts:
    changes |= {"data__train_batch_size": 2, "actor_rollout_ref__actor__ppo_mini_batch_size": 2, ROLLOUT + "n": 2}
    trainer = make(**changes)
    return PendingPrompts(trainer.cfg.actor_rollout_ref.rollout, trainer.plan)


def test_the_batch_is_the_oldest_prompts_that_are_complete(make):
    pending = pending_of(make, **OVERSAMPLE, **{ROLLOUT + "tail_max_age": 2})
    draws = iter([[Prompt(5, 1), Prompt(6, 1)], [Prompt(7, 2), Prompt(8, 2)], [Prompt(9, 3), Prompt(5, 3)]])
    started = pending.next_prompts(lambda: next(draws))
    assert [prompt.row for prompt in started] == [5, 6, 7]
    assert pending.terms(started) == {"target_complete": 2, "num_required": 0, "pending_mask": None}
    _, ids, metrics = pending.collect_complete(started, samples_of([[True, False], [True, True], [True, True]]))
    assert ids.tolist() == [2, 3, 4, 5]
    assert metrics["rollout/tail/tokens_thrown_away"] == 6
    assert metrics["rollout/tail/tokens_generated"] == 18
    assert pending.state() == [[5, 1, 1], [8, 2, 0]]
    restored = pending_of(make, **OVERSAMPLE)
    restored.restore(json.loads(json.dumps(pending.state())))
    assert restored.state() == pending.state()
    started = pending.next_prompts(lambda: next(draws))
    assert [prompt.row for prompt in started] == [5, 8, 9]
    # All are complete: the last has to wait, although it has its answers.
    pending.collect_complete(started, samples_of([[False, False], [True, True], [True, True]]))
    assert pending.state() == [[5, 1, 2], [5, 3, 0]]
    started = pending.next_prompts(lambda: [Prompt(1, 4), Prompt(2, 4)])
    assert pending.terms(started)["num_required"] == 1


def test_carried_answers_stay_and_only_missing_are_asked_for(make):
    pending = pending_of(make, **CARRY)
    started = pending.next_prompts(lambda: [Prompt(5, 1), Prompt(6, 1), Prompt(7, 1)])
    assert pending.begun(started) is None
    pending.collect_complete(started, samples_of([[True, True], [False, True], [True, True]]))
    (waiting,) = pending.next_prompts(lambda: [Prompt(8, 2), Prompt(9, 2)])[:1]
    assert (waiting.row, waiting.age) == (6, 1)
    assert pending.terms([Prompt(8, 2), waiting])["pending_mask"].tolist() == [[True, True], [True, False]]
    assert pending.terms([waiting, Prompt(8, 2)])["target_complete"] == 2
    assert waiting.answers["token_ages"].tolist() == [3, 3]
    second = samples_of([[True, True], [False, False]], length=9, unserved=(3,))
    _, ids, metrics = pending.collect_complete([Prompt(8, 2), waiting], second)
    assert ids.tolist() == [0, 1]
    assert metrics["rollout/tail/tokens_generated"] == 9 + 9 + (9 - 3)
    (again,) = pending.next_prompts(lambda: [Prompt(1, 3), Prompt(2, 3)])[:1]
    assert again.age == 2
    assert again.answers["response_length"].tolist() == [9, 3]
    assert again.answers["complete"].tolist() == [False, True]
    assert again.answers["token_ages"].tolist() == [3 + 9, 3 + 3]
    assert {part.ref[row] for part in again.answers.parts_with("text") for row in part.rows} == {"9:2", "3:3"}


def test_validation_and_the_greedy_baseline_are_never_cut_short(make):
    trainer = make(**OVERSAMPLE, algorithm__adv_estimator="remax")
    asked = []
    generate = trainer.actor.generate
    trainer.actor.generate = lambda task, *others: asked.append(task) or generate(task, *others)
    metrics = trainer.step(1).metrics
    trainer.validation.run(1, Stop())
    assert [task.target_complete for task in asked] == [4, None, None]
    assert len(asked[1].rows) == 4
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({ROLLOUT + "tail": "carry_over"}, "algorithm.rollout_correction.rollout_is=token .got null."),
        (CARRY | {IS: "sequence"}, "rollout_is=token .got sequence."),
        (OVERSAMPLE | {"algorithm__filter_groups__enable": True}, "both choose the prompts"),
        ({ROLLOUT + "tail": "exact"}, "rollout.name=vllm"),
        (OVERSAMPLE | {ROLLOUT + "oversample_ratio": 2.5}, "between 1 and 2"),
        (OVERSAMPLE | {ROLLOUT + "tail_max_age": 0}, "at least 1"),
        ({ROLLOUT + "tail": "fast"}, "use one of off, exact, oversample, carry_over"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(make, changes, words):
    with pytest.raises(ConfigError, match=words):
        make(**changes)
