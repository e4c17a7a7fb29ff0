"""Settings that would be taken and ignored: refused by name, or read as verl reads them."""

import numpy as np
import pytest

from rltrain.api import look_over
from rltrain.base.errors import ConfigError, RewardError
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.schema.keys import get
from rltrain.controller.samples import Samples
from rltrain.rewards.processes.score import Score
from rltrain.run.scorers import check_columns
from rltrain.trainer.rewards import known_number

A = "actor_rollout_ref."
BASE = [f"{A}model.path=m", "data.train_files=t.parquet", f"{A}rollout.n=4", "trainer.n_gpus_per_node=8"]
GRPO, GAE = ["algorithm.adv_estimator=grpo"], ["algorithm.adv_estimator=gae"]


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(load_config([*BASE, *words]))
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "fp16"])
@pytest.mark.parametrize("sharding", [f"{A}actor.fsdp_config", "critic.model.fsdp_config", "critic.fsdp"])
def test_no_weights_that_learn_rest_in_float16(sharding, dtype):
    line = refused(*GAE, f"{sharding}.model_dtype={dtype}")
    assert line.startswith(f"{sharding}.model_dtype={dtype}: weights that learn rest in float32")


@pytest.mark.parametrize("key", ["dtype", "compute_dtype", "mixed_precision.param_dtype"])
@pytest.mark.parametrize("sharding", [f"{A}actor.fsdp_config", "critic.model.fsdp_config", "critic.fsdp"])
def test_float16_is_what_a_model_computes_in(sharding, key):
    cfg = load_config([*BASE, *GAE, f"{sharding}.{key}=float16"])
    check(cfg)
    section = sharding.replace("critic.fsdp", "critic.model.fsdp_config")
    assert get(cfg.config, f"{section}.compute_dtype") == "float16"
    (note,) = look_over(load_config([*BASE, *GAE, f"{sharding}.mixed_precision.reduce_dtype=fp16"]))
    assert "gradients are always reduced in float32" in note


def test_models_that_are_not_trained_may_rest_in_float16():
    judge = ["reward_model.enable=True", "reward_model.model.path=r", "reward_model.model.fsdp_config.dtype=float16"]
    look_over(load_config([*BASE, *GRPO, *judge, f"{A}rollout.dtype=float16"]))
    # There is no critic to train.
    look_over(load_config([*BASE, *GRPO, "critic.model.fsdp_config.model_dtype=float16"]))


def test_the_parameters_of_mixed_precision_are_those_of_the_computation():
    word = f"{A}actor.fsdp_config.mixed_precision.param_dtype=bf16"
    assert get(load_config([word]).config, f"{A}actor.fsdp_config.compute_dtype") == "bf16"


@pytest.mark.parametrize("size", ["data_parallel_size", "pipeline_model_parallel_size"])
def test_sizes_of_an_engine_that_are_not_here_are_refused(size):
    assert refused(*GRPO, f"{A}rollout.{size}=2").startswith(f"{A}rollout.{size}=2: ")
    for one in ("1", "null"):
        assert look_over(load_config([*BASE, *GRPO, f"{A}rollout.{size}={one}"])) == []


def test_how_adapters_reach_the_engine_is_verls_key():
    for merge in (True, False):
        loaded = load_config([*BASE, *GRPO, f"{A}model.lora_rank=8", f"{A}model.lora.merge={merge}"])
        assert look_over(loaded) == []
        assert loaded.config.actor_rollout_ref.model.merges is merge
    (note,) = look_over(load_config([*BASE, *GRPO, f"{A}model.lora.merge=False"]))
    assert note.startswith(f"{A}model.lora.merge: no effect")
    engine = f"{A}rollout.name=sglang"
    assert "rollout.name=hf or rollout.name=vllm" in refused(
        *GRPO, f"{A}model.lora_rank=8", f"{A}model.lora.merge=False", engine
    )


def test_what_a_checkpoint_does_all_the_same_is_said():
    for name in ("async_save", "strict"):
        (note,) = look_over(load_config([*BASE, *GRPO, f"{A}actor.checkpoint.{name}=False"]))
        assert note.startswith(f"{A}actor.checkpoint.{name}: no effect")


def test_the_metric_reward_is_the_reward_before_the_kl():
    words = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward"]
    loaded = load_config([*BASE, *GRPO, *words])
    assert loaded.config.algorithm.filter_groups.metric == "seq_reward"
    assert look_over(loaded) == [
        "algorithm.filter_groups.metric=reward is algorithm.filter_groups.metric=seq_reward here"
    ]


def test_a_metric_that_no_scorer_returns_is_told_with_those_there_are():
    words = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=solved"]
    config = load_config([*BASE, *GRPO, *words]).config
    with pytest.raises(ConfigError, match=r"metric=solved: .* It returns score, acc, format"):
        check_columns(config, [Score(1.0, "ok", extras={"format": 1.0, "acc": 1.0})])
    weighed = load_config([*BASE, *GRPO, *words, "trainer.val_only=True", "reward.weights.fromat=1"]).config
    with pytest.raises(ConfigError, match=r"reward.weights=fromat: a scorer of data.val_files returns no"):
        check_columns(weighed, [Score(1.0, "ok", extras={"format": 1.0})], "val")
    # A scorer that returned it for the first rows, and not for others.
    samples = Samples(2)
    samples.update({"score": np.ones(2), "scorer/acc": np.ones(2), "reward_failed": np.zeros(2)})
    with pytest.raises(RewardError, match=r"no number 'solved' .* It returned acc"):
        known_number(samples, "solved", 0.0)


def test_an_engine_whose_head_cannot_be_in_float32_is_refused():
    wide = f"{A}model.fp32_head=True"
    assert "rollout.name=sglang computes its head in half precision" in refused(*GRPO, wide, f"{A}rollout.name=sglang")
    for name in ("hf", "vllm"):
        check(load_config([*BASE, *GRPO, wide, f"{A}rollout.name={name}"]))


@pytest.mark.parametrize("value", [True, False])
def test_a_removed_key_is_answered_and_loads_from_saved_configurations(tmp_path, value):
    saved = tmp_path / "config.yaml"
    saved.write_text(f"trainer: {{overlap: {str(value).lower()}, total_epochs: 3}}\n")
    for loaded in (load_config([], [str(saved)]), load_config([f"trainer.overlap={value}", "trainer.total_epochs=3"])):
        assert loaded.config.trainer.total_epochs == 3
        notes = [note for note in loaded.warnings if "trainer.overlap" in note]
        sentence = "trainer.overlap: no effect: it was removed (it saved 6 % on a small test): leave it out"
        assert notes == [sentence] * value
