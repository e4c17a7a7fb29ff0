"""Where the tokens of an update go is measured, and experts that die are told of once."""

import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PhimoeConfig

from rltrain.trainer.experts import ExpertLoad
from tests.tiny import CHARACTERS, SPECIALS, save_tiny_tokenizer
from tests.trainer.test_router_replay import EXPERTS, MODE, A, save_moe

NAMES = ("moe/max_vio/mean", "moe/max_vio/max", "moe/idle_experts", "moe/dead_experts")
EVEN = np.full((2, 4), 100)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save_moe(tmp_path_factory.mktemp("moe"))


def of_moe(metrics):
    return {name: value for name, value in metrics.items() if name.startswith("moe/")}


def test_the_metrics_by_hand():
    load = np.array([[6, 2, 0, 0], [2, 2, 2, 2]])
    # Mean 2: the busiest has three times the mean, so MaxVio is 2; an even layer has 0.
    assert ExpertLoad(4, compiled=False).measure(load) == dict(zip(NAMES, (1.0, 2.0, 2.0, 0.0), strict=True))
    assert ExpertLoad(4, compiled=False).measure(0 * load) == {}


def test_a_step_tells_of_its_experts_however_it_is_cut(process_group, tiny_trainer, moe):
    # One optimizer step, as the router has changed before a second.
    keys = {"actor_rollout_ref__model__path": moe, A + "ppo_mini_batch_size": 4}
    whole = of_moe(tiny_trainer(**keys, **{A + "ppo_max_token_len_per_gpu": 4000}).step(1).metrics)
    assert set(whole) == set(NAMES)
    assert 0 < whole["moe/max_vio/mean"] <= whole["moe/max_vio/max"] <= EXPERTS - 1
    cut = {A + "ppo_micro_batch_size_per_gpu": 1, A + "use_dynamic_bsz": False}
    assert of_moe(tiny_trainer(**keys, **cut).step(1).metrics) == whole
    # In float32 replay chooses what the router would.
    assert of_moe(tiny_trainer(**keys, **{MODE: "R3"}).step(1).metrics) == whole


def test_the_reference_of_adapters_is_not_counted(process_group, tiny_trainer, moe):
    lora = {"actor_rollout_ref__model__lora_rank": 2, "actor_rollout_ref__model__target_modules": "[q_proj,v_proj]"}
    lora |= {A + "use_kl_loss": True, "actor_rollout_ref__model__path": moe}
    loads = {}
    for kind in ("k3", "full"):  # the whole distribution of the reference is computed beside each micro-batch
        trainer = tiny_trainer(**lora, **{A + "kl_loss_type": kind})
        update, seen = trainer.worker.actor.update, []

        def kept(batch, task, update=update, seen=seen):
            seen.append(update(batch, task))
            return seen[-1]

        trainer.worker.actor.update = kept
        trainer.step(1)
        loads[kind] = seen[0].expert_load
    assert loads["k3"].sum() > 0
    assert np.array_equal(loads["k3"], loads["full"])


@pytest.mark.parametrize(
    ("compiled", "why"), [(True, "layers that are compiled do not show"), (False, "its routers do not show")]
)
def test_a_load_that_cannot_be_seen_is_told_of_once(caplog, compiled, why):
    load = ExpertLoad(4, compiled=compiled)
    assert load.measure(None) == load.measure(None) == {}
    assert [record.getMessage() for record in caplog.records] == [
        f"note: the load of the policy's experts is not measured, since {why} where tokens go"
    ]
    caplog.clear()
    ExpertLoad(0, compiled=compiled).measure(None)
    assert not caplog.records


def test_routers_that_choose_otherwise_train_without_the_metric(process_group, tiny_trainer, tmp_path, caplog):
    save_tiny_tokenizer(tmp_path)
    config = PhimoeConfig(
        vocab_size=len(CHARACTERS) + len(SPECIALS), hidden_size=32, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=128, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trainer = tiny_trainer(actor_rollout_ref__model__path=tmp_path)
    for step in (1, 2):
        assert not of_moe(trainer.step(step).metrics)
    assert len([record for record in caplog.records if "is not measured" in record.getMessage()]) == 1


def dying(steps: int, load: ExpertLoad) -> list[float]:
    """Expert 2 of layer 1 has no tokens any more."""
    loads = EVEN.copy()
    loads[1] = [133, 133, 0, 134]
    return [load.measure(loads)["moe/dead_experts"] for _ in range(steps)]


def test_an_expert_that_dies_is_told_of_once_and_counted(caplog):
    load = ExpertLoad(4, compiled=False)
    for _ in range(3):
        load.measure(EVEN)
    assert dying(4, load) == [0] * 4
    assert not caplog.records
    # A resumed run remembers.
    resumed = ExpertLoad(4, compiled=False)
    resumed.restore(load.state())
    assert dying(3, resumed) == [1] * 3
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert told.getMessage().startswith(
        "1 of the policy's experts had tokens before and none in the last 5 updates, such as expert 2 of layer 1 of "
    )
    assert "actor_rollout_ref.actor.router_replay.mode=R2 or R3" in told.getMessage()
    again = ExpertLoad(4, compiled=False)
    again.restore(resumed.state())
    assert dying(1, again) == [1]
    assert len(caplog.records) == 1
    assert again.measure(EVEN)["moe/dead_experts"] == 0


def test_an_expert_that_was_never_used_or_seldom_is_not_dead(caplog):
    load = ExpertLoad(4, compiled=False)
    for _ in range(20):
        load.measure(np.array([[0, 100, 100, 200]]))
    load.measure(np.array([[1, 100, 100, 199]]))
    for _ in range(20):
        assert load.measure(np.array([[0, 100, 100, 200]]))["moe/dead_experts"] == 0
    assert not caplog.records


def test_a_load_that_grows_uneven_is_told_of_once(caplog):
    load, uneven = ExpertLoad(8, compiled=False), np.full((1, 8), 50)
    uneven[0, 3] = 450
    for _ in range(7):
        load.measure(np.full((1, 8), 100))
    for step in range(12):
        if step == 4:
            load.measure(np.full((1, 8), 100))  # not in a row
        load.measure(uneven)
        assert len(caplog.records) == (step >= 8)
    assert "moe/max_vio/mean is 3.5, and was 0 in the first updates" in caplog.text
    # One that was uneven from the beginning has not grown.
    caplog.clear()
    load = ExpertLoad(8, compiled=False)
    for _ in range(20):
        load.measure(uneven)
    assert not caplog.records
