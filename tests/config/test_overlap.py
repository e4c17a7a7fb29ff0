"""When devices can compute without the others, and what is said where they cannot."""

import pytest

from rltrain.config.check import broken_rules
from rltrain.config.load import load_config
from rltrain.config.notes import without_effect
from rltrain.config.overlap import ranks_with_all_weights

A = "actor_rollout_ref."
SHARDS, ENGINE = f"{A}actor.fsdp_config.fsdp_size", f"{A}rollout.tensor_model_parallel_size"
SEQUENCE, REF = f"{A}actor.ulysses_sequence_parallel_size", f"{A}ref.ulysses_sequence_parallel_size"
KL = "algorithm.use_kl_in_reward=True"
EIGHT = ("trainer.n_gpus_per_node=8", "trainer.overlap=True")


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        ([f"{SHARDS}=-1"], 8),
        ([f"{SHARDS}=16"], 8),
        ([f"{SHARDS}=1"], 1),
        ([f"{SHARDS}=1", f"{ENGINE}=2"], 2),
        ([f"{SHARDS}=2", f"{SEQUENCE}=4"], 4),
        ([f"{SHARDS}=1", f"{REF}=8"], 1),  # there is no reference
        ([f"{SHARDS}=1", f"{REF}=4", KL], 4),
        # Neither LoRA nor images change who has which weights.
        ([f"{SHARDS}=2", f"{A}model.lora_rank=4"], 2),
        ([f"{SHARDS}=2", "data.image_key=images"], 2),
    ],
)
def test_neighbours_that_hold_all_are_counted(keys, ranks):
    loaded = load_config([*EIGHT, *keys])
    assert ranks_with_all_weights(loaded.config) == ranks
    assert any("trainer.overlap" in problem for problem in broken_rules(loaded)) == (ranks == 8)


@pytest.mark.parametrize(
    ("keys", "deciding"),
    [
        ([], [SHARDS]),
        ([f"{SHARDS}=2", f"{SEQUENCE}=8"], [SHARDS, SEQUENCE]),
        ([f"{SHARDS}=2", f"{SEQUENCE}=8", f"{ENGINE}=2"], [SEQUENCE]),
        ([f"{SHARDS}=1", f"{REF}=8", KL], [REF]),
        ([f"{SEQUENCE}=8", KL], [SHARDS, SEQUENCE]),
    ],
)
def test_the_sizes_that_keep_devices_waiting_are_named(keys, deciding):
    (problem,) = (each for each in broken_rules(load_config([*EIGHT, *keys])) if "trainer.overlap" in each)
    assert [key for key in (SHARDS, SEQUENCE, REF, ENGINE) if key in problem] == deciding


def test_one_engine_has_nothing_to_begin_early():
    loaded = load_config([*EIGHT, f"{ENGINE}=8"])
    assert not [problem for problem in broken_rules(loaded) if "trainer.overlap" in problem]
    assert any("trainer.overlap" in line and "one engine" in line for line in without_effect(loaded))
