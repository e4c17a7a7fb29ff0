"""Keys that the error of a full device names have an effect in the phase that failed."""

import pytest

from rltrain.config.load import load_config
from rltrain.config.memory_keys import memory_keys
from tests.tiny import small_run

A, C, R = "actor_rollout_ref.actor.", "critic.", "actor_rollout_ref.rollout."
GAE = {"algorithm.adv_estimator": "gae"}
CASES = {
    "an actor's own optimizer is needed in its update": ({}, "update_actor", (), ("fsdp_config.optimizer_offload",)),
    "samples decide": (
        {f"{A}ppo_micro_batch_size_per_gpu": 4}, "update_actor", (f"{A}ppo_micro_batch_size_per_gpu less than 4",),
        ("ppo_max_token_len_per_gpu",),
    ),
    "tokens decide": ({}, "old_log_prob", (f"{A}ppo_max_token_len_per_gpu less than 64",), ()),
    "the least tokens, then more devices": (
        {f"{A}ppo_max_token_len_per_gpu": 24}, "update_actor",
        (f"{A}ulysses_sequence_parallel_size=2 with {A}ppo_max_token_len_per_gpu less than 24",), (),
    ),
    "a critic that has the actor's tokens": (
        GAE, "update_critic",
        (f"{A}ppo_max_token_len_per_gpu less than 64", f"{A}fsdp_config.optimizer_offload=True"),
        ("critic.model.fsdp",),
    ),
    "a critic's own devices": (
        GAE | {f"{C}ppo_max_token_len_per_gpu": 24}, "values",
        (f"{C}ulysses_sequence_parallel_size=2 with {C}ppo_max_token_len_per_gpu less than 24",), (f"{A}ulysses",),
    ),
    "a reward model rests on the host": (
        {"reward_model.enable": True, "reward_model.model.path": "/no"}, "update_actor",
        ("reward_model.model.fsdp_config.param_offload=True",), (),
    ),
    "the share of an engine": (
        {f"{R}name": "vllm"}, "gen", (f"{R}gpu_memory_utilization less than 0.5",), (f"{R}free_cache_engine",),
    ),
    "an engine that is not freed": (
        {f"{R}name": "vllm", f"{R}free_cache_engine": False}, "update_actor", (f"{R}free_cache_engine=True",), (),
    ),
    "no reference": ({f"{A}use_kl_loss": False}, "update_actor", (), ("actor_rollout_ref.ref",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_named_makes_room_in_the_phase(tmp_path, name):
    changes, phase, named, not_named = CASES[name]
    keys = {"trainer.device": "npu", "trainer.n_gpus_per_node": 2, **changes}
    arguments = small_run(tmp_path, (tmp_path,) * 2, tmp_path, **{k.replace(".", "__"): v for k, v in keys.items()})
    said = [change for _, change in memory_keys(load_config(arguments).config, phase)]
    assert not set(named) - set(said), said
    assert not [each for each in said for word in not_named if word in each], said
    assert len({each.replace("=", " ").split()[0] for each in said}) == len(said)
