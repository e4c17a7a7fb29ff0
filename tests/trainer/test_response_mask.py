"""Tokens of a response that the policy did not choose, such as a tool's text between two turns, are only context."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.common.columns.ragged import Ragged
from rltrain.models.weights.shard import reshard
from rltrain.trainer.batching.mini_batches import denominators
from rltrain.workers.interface.tasks import MiniBatch, UpdateTask
from tests.batches import prompt_lengths, rows_of
from tests.distance import distance
from tests.local import local_trainer
from tests.tiny import small_run

pytestmark = pytest.mark.usefixtures("process_group")

A = "actor_rollout_ref__actor__"
GAE = {
    "algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": True, "algorithm__gamma": 0.9,
    "algorithm__lam": 0.8,
    "algorithm__rollout_correction__rollout_is": "token", A + "entropy_coeff": 0.1, A + "ppo_mini_batch_size": 4,
}  # fmt: skip


@pytest.fixture
def make(tiny_model, arithmetic_files, tmp_path):
    """make(**changes): return a trainer whose rollout has tool text in the middle, and at the end of every third
    response."""

    def trainer(**changes):
        scores = iter(range(10**6))
        arguments = small_run(tiny_model, arithmetic_files, tmp_path, **changes)
        made = local_trainer(arguments, lambda row, score: score + next(scores) % 3)
        rollout = made.worker.rollout
        generate = rollout.generate

        def with_tools(task):
            batch, texts, numbers = generate(task)
            mask, engine = batch.ragged("response_mask"), batch.ragged("rollout_log_probs")
            position, length = mask.positions, mask.lengths[mask.row_ids]
            ends = (mask.row_ids % 3 == 0) & (position == length - 1)
            mask = mask.like(~(((position > 0) & (position < 3)) | (ends & (length > 3))))
            batch.update({"response_mask": mask, "rollout_log_probs": Ragged(engine.values[mask.values], mask.sum())})
            counts = mask.sum().numpy()
            per_sample = numbers.per_sample | {"policy_tokens": counts, "loss_tokens": counts}
            return batch, texts, replace(numbers, per_sample=per_sample)

        rollout.generate = with_tools
        return made

    return trainer


def by_transformers(folder, batch) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module]:
    """Return log-probs (differentiable) and entropies of the policy's tokens, and their model."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    log_probs, entropies = [], []
    rows = zip(rows_of(batch), prompt_lengths(batch), batch.ragged("response_mask").rows(), strict=True)
    for row, head, mask in rows:
        logs = torch.log_softmax(plain(row[None].long()).logits[0, head - 1 : -1].float(), -1)[mask]
        log_probs.append(logs.gather(-1, row[head:][mask].long()[:, None])[:, 0])
        entropies.append(-(logs.exp() * logs).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies), plain


def test_loss_and_gradient_leave_tool_text_out(make, tiny_model):
    trainer = make(**{A + "use_kl_loss": False, A + "entropy_coeff": 0.1})
    actor = trainer.worker.actor
    batch, _, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    mask = batch.ragged("response_mask")
    assert 0 < mask.values.sum() < len(mask.values)
    columns, found = actor.log_probs(batch, [5, 6, 5])
    expected, entropy, plain = by_transformers(tiny_model, batch)
    assert (
        columns.ragged("old_log_probs").lengths.tolist()
        == mask.sum().tolist()
        == numbers.per_sample["policy_tokens"].tolist()
    )
    assert distance(columns.ragged("old_log_probs").values, expected.detach()) < 1e-5
    assert found.moments["k1"].count == len(expected)
    assert found.moments["entropy"].total == pytest.approx(float(entropy.sum().detach()), rel=1e-5)
    batch.update(columns)
    batch.update({"advantage": torch.linspace(-1, 1, len(batch)), "sample_id": torch.arange(len(batch))})
    task = UpdateTask(
        (MiniBatch((16,), denominators(numbers.per_sample["loss_tokens"], np.arange(16), 8)),), 0.0, entropy_coeff=0.1
    )
    share = actor._loss(batch, task.mini_batches[0], task)
    share.loss.backward()
    per_token = torch.linspace(-1, 1, len(batch)).repeat_interleave(mask.sum())
    by_hand = (-per_token * (expected - expected.detach()).exp() - 0.1 * entropy).sum() / len(expected)
    by_hand.backward()
    assert float(share.loss.detach()) == pytest.approx(float(by_hand.detach()), rel=1e-5)
    parameters = actor.policy.named_parameters()
    found = {name.removeprefix("model."): each.grad.full_tensor() for name, each in parameters if each.grad is not None}
    assert distance(found, {name: each.grad for name, each in plain.named_parameters()}) < 1e-4
    reshard(actor.policy)


def test_gae_kl_and_reward_pass_over_tool_text(make):
    trainer = make(**GAE)
    answered = trainer.step(1)
    metrics, samples = answered.metrics, answered.samples

    def rows(name):
        (part,) = samples.parts_with(name)
        order = np.argsort(part.ids)
        return [part.ref.ragged(name).rows()[row].tolist() for row in part.rows[order]]

    kl, values, found = rows("ref_kl"), rows("values"), rows("advantages")
    coef = metrics["actor/reward_kl_penalty_coeff"]
    assert samples["kl_sum"].tolist() == pytest.approx([sum(row) for row in kl])
    for sample, length in enumerate(samples["policy_tokens"].tolist()):
        assert len(kl[sample]) == len(values[sample]) == length
        later, expected = 0.0, []
        for place in reversed(range(length)):
            last = place == length - 1
            reward = samples["score"][sample] * last - coef * kl[sample][place]
            following = 0.0 if last else values[sample][place + 1]
            later = reward + 0.9 * following - values[sample][place] + 0.72 * later
            expected.insert(0, later)
        assert found[sample] == pytest.approx(expected, abs=1e-5)
    every = np.concatenate([np.array(row) for row in found])
    whitened = (every - every.mean()) / every.std(ddof=1)
    assert metrics["critic/advantages/max"] == pytest.approx(whitened.max(), rel=1e-4)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(
        np.mean([sum(row) / max(len(row), 1) for row in kl]), abs=1e-7
    )
