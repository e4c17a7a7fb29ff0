"""Keys that the error of a full device names have an effect in the phase that failed."""

import pytest

from rltrain.config.load import load_config
from rltrain.config.memory_keys import memory_keys
from tests.tiny import small_run

A, C, R = "actor_rollout_ref.actor.", "critic.", "actor_rollout_ref.rollout."
GAE = {"algorithm.adv_estimator": "gae"}
CASES = {
    "samples decide": (
        {f"{A}ppo_micro_batch_size_per_gpu": 4}, "update_actor", (f"{A}ppo_micro_batch_size_per_gpu less than 4",),
        ("ppo_max_token_len_per_gpu",),
    ),
    "the least tokens, then more devices": (
        {f"{A}ppo_max_token_len_per_gpu": 24}, "update_actor",
        (f"{A}ulysses_sequence_parallel_size=2 with {A}ppo_max_token_len_per_gpu less than 24",), (),
    ),
    "a critic that has the actor's tokens": (
        GAE, "update_critic",
        (f"{A}ppo_max_token_len_per_gpu less than 64", f"{A}fsdp_config.optimizer_offload=True"),
        ("critic.model.fsdp",),
    ),
    "a reward model rests on the host": (
        {"reward_model.enable": True, "reward_model.model.path": "/no"}, "update_actor",
        ("reward_model.model.fsdp_config.param_offload=True",), (),
    ),
    "the share of an engine": (
        {f"{R}name": "vllm"}, "gen", (f"{R}gpu_memory_utilization less than 0.5",), (f"{R}free_cache_engine",),
    ),
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
