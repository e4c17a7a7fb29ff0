"""The experts that the old_log_prob pass or the engine has selected are used in the update."""

import re

import pytest
import torch

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.common.errors import ConfigError
from rltrain.models.attention.packing import computed_tokens, pack, per_computed_token
from rltrain.models.routing import Routing
from tests.tiny_tools import save_calling_model, tool_run
from tests.trainer.steps import CHOSEN, LAYERS, save_moe  # noqa: F401 - for tests/e2e

A, R = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
MODE = A + "router_replay__mode"


@pytest.fixture
def replays(monkeypatch):
    """The routing that every forward of a trained model is given."""
    given = []
    replay = Routing.replay
    monkeypatch.setattr(Routing, "replay", lambda self, choice: (given.append(choice), replay(self, choice))[1])
    return given


def test_the_update_goes_where_the_old_log_prob_pass_went(process_group, tiny_trainer, moe, replays):
    keys = {"actor_rollout_ref__model__path": moe, A + "recompute_old_log_prob": "always", A + "ppo_mini_batch_size": 4}
    plain = tiny_trainer(**keys)
    without = plain.step(1).metrics
    assert all(choice is None for choice in replays)
    replays.clear()
    replayed = tiny_trainer(**keys, **{MODE: "R2"}).step(1).metrics
    # The pass itself is free; each micro-batch of the update is not.
    firsts = [choice is None for choice in replays]
    assert not firsts[-1]
    assert firsts == sorted(firsts, reverse=True)
    # In one process with float32 nothing rounds otherwise, so nothing changes.
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl"):
        assert replayed[name] == pytest.approx(without[name], abs=1e-6)


def test_the_engine_tells_where_its_tokens_went(process_group, tiny_trainer, moe):
    trainer = tiny_trainer(actor_rollout_ref__model__path=moe, **{MODE: "R3"})
    rollout, actor = trainer.worker.rollout, trainer.worker.actor
    batch, _, _ = rollout.generate(trainer.experience_task())
    routed = batch.ragged(c.ROUTED_EXPERTS)
    assert routed.values.shape[1:] == (LAYERS, CHOSEN)
    assert str(routed.values.dtype).removeprefix("torch.") in c.COLUMNS[c.ROUTED_EXPERTS].dtype
    assert routed.lengths.tolist() == computed_tokens(batch).tolist()
    # The trainer's router, left alone, chooses the same in float32.
    alone = {name: batch[name] for name in batch if name != c.ROUTED_EXPERTS}
    own = actor.policy(pack(Batch(alone), torch.device("cpu")), with_experts=True).experts
    assert torch.equal(per_computed_token(own, batch).values.sort(-1)[0], routed.values.sort(-1)[0])
    assert trainer.step(1).metrics["training/rollout_probs_diff_mean"] < 1e-4


def test_replaying_the_engine_closes_the_gap_that_its_rounding_opens(process_group, tiny_trainer, moe):
    # So many tokens that some are near a tie on any CPU.
    keys = {"actor_rollout_ref__model__path": moe, R + "dtype": "bfloat16", R + "n": 8, R + "ignore_eos": True}
    keys |= {"data__max_response_length": 64, A + "ppo_max_token_len_per_gpu": 400}
    gaps = {
        mode: tiny_trainer(**keys, **{MODE: mode}).step(1).metrics["training/rollout_probs_diff_max"]
        for mode in ("disabled", "R3")
    }
    assert gaps["R3"] < gaps["disabled"] / 2


def test_turns_go_on_where_the_row_was_kept(process_group, tiny_trainer, tmp_path):
    """The engine computes only the new tokens of a later turn, and reports only their routing."""
    folder = save_calling_model(tmp_path / "calling", experts=True)
    trainer = tiny_trainer(**tool_run(folder, tmp_path), **{MODE: "R3"})
    batch, _, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    assert numbers.num_reused_tokens
    alone = Batch({name: batch[name] for name in batch if name != c.ROUTED_EXPERTS})
    own = trainer.worker.actor.policy(pack(alone, torch.device("cpu")), with_experts=True).experts
    told = batch.ragged(c.ROUTED_EXPERTS)
    assert torch.equal(per_computed_token(own, batch).values.sort(-1)[0], told.values.sort(-1)[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({MODE: "R2", "algorithm__rollout_correction__bypass_mode": True}, "skips it. Use R3"),
        ({MODE: "R3", R + "name": "sglang"}, "rollout.name=hf or rollout.name=vllm, or R2"),
        ({MODE: "R3", R + "name": "vllm"}, "enable_prefix_caching=False"),
        ({MODE: "R3", R + "name": "vllm"}, "Set actor_rollout_ref.rollout.enforce_eager=True"),
        ({MODE: "R2", A + "fsdp_config__use_torch_compile": True}, "Leave fsdp_config.use_torch_compile out"),
        ({MODE: "R3", R + "tail": "carry_over"}, "two policies"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tiny_trainer, moe, changes, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        tiny_trainer(actor_rollout_ref__model__path=moe, **changes)
