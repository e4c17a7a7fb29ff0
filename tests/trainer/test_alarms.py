"""Conditions that end a run before they spoil it: impossible tokens of the engine, and equal rewards."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rltrain.common.columns.ragged import Ragged
from rltrain.common.errors import NonFiniteError, RewardError
from rltrain.trainer.metrics.alarms import Alarms
from tests.tiny import SPECIALS

pytestmark = pytest.mark.usefixtures("process_group")


def damage(trainer, token=None, log_prob=None, prompt_index=0, sample=3):
    """Replace ``token``, or its ``log_prob``, at the first position of one response of every generation."""
    engine = trainer.worker.rollout.engine
    generate = engine.generate

    def damaged(source, sampling):
        on_turn_end = source.on_turn_end

        def damage_one(turn):
            if (turn.prompt_index, turn.sample) == (prompt_index, sample):
                turn.tokens[:1] = [turn.tokens[0] if token is None else token]
                turn.log_probs[:1] = [turn.log_probs[0] if log_prob is None else log_prob]
            on_turn_end(turn)

        source.on_turn_end = damage_one
        generate(source, sampling)

    engine.generate = damaged


@pytest.mark.parametrize("what", [{"token": 20}, {"token": -1}, {"log_prob": float("nan")}, {"log_prob": -np.inf}])
def test_a_damaged_answer_is_empty_and_counted(tiny_trainer, monkeypatch, caplog, what):
    monkeypatch.setattr("rltrain.workers.rollout_worker._MOST_DAMAGED", 0.1)
    trainer = tiny_trainer()
    damage(trainer, **what)
    batch, texts, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    assert numbers.num_damaged == 1
    assert numbers.per_sample["response_length"][3] == 0
    assert texts[3] == ""
    assert batch.ragged("response").lengths.bool().sum() == 15
    assert isinstance(batch.ragged("rollout_log_probs"), Ragged)
    for step in (1, 2):
        metrics = trainer.step(step).metrics
        assert metrics["rollout/damaged_answers"] == 1
        assert np.isfinite(metrics["actor/grad_norm"])
    (warning,) = [record for record in caplog.records if "and count as empty" in record.getMessage()]
    assert warning.getMessage().startswith("1 responses had")


def test_an_engine_that_damages_many_answers_stops_the_run(tiny_trainer):
    trainer = tiny_trainer()
    damage(trainer, token=20)
    with pytest.raises(NonFiniteError, match="1 of 16 responses of the rollout engine 'hf' have token ids outside"):
        trainer.step(1)


@pytest.mark.fault("Weights with NaN in the model's file end the run before it learns, exit 70")
def test_a_model_file_with_nan_is_not_trained_on(tiny_model, tiny_trainer, tmp_path):
    """One row of the embedding is damaged: that of a digit that the first prompt lacks."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    weights = load_file(model / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    config = (model / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (model / "config.json").write_text(config)
    weights["lm_head.weight"] = table.clone()
    table[len(SPECIALS) + 1] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"not finite \(NaN or infinity\): model.embed_tokens.weight"):
        tiny_trainer(actor_rollout_ref__model__path=model)


def test_rewards_that_never_differ_stop_the_run(tiny_trainer):
    trainer = tiny_trainer(lambda row, score: 0.0, trainer__collapse_steps=2)
    assert trainer.step(1).metrics["reward/equal_steps"] == 1
    with pytest.raises(RewardError, match=r"the last 2 steps had the same reward \(now 0\).*trainer.collapse_steps=2"):
        trainer.step(2)


def test_without_a_limit_equal_rewards_are_told_once(caplog):
    alarms = Alarms(1.0)
    equal, other = np.ones(4), np.arange(4.0)
    found = [alarms.collapsed(each)["reward/equal_steps"] for each in [equal] * 9 + [other] + [equal] * 25]
    assert found == [*range(1, 10), 0, *range(1, 26)]
    assert len([record for record in caplog.records if "trainer.collapse_steps=N" in record.getMessage()]) == 1
