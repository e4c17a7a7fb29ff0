"""Passes by hand, and phases that add up to the step."""

from dataclasses import replace

import numpy as np
import pytest

from rltrain.base.chips import find_chip
from rltrain.base.device import Device
from rltrain.base.errors import ConfigError
from rltrain.config.load import load_config
from rltrain.run.estimate import about_seconds
from rltrain.run.seconds.assumptions import Assumptions
from rltrain.run.seconds.lengths import read_lengths
from rltrain.run.seconds.passes import PassSpeed, mini_batches_of, time_pass
from rltrain.run.seconds.step import foretell, sizes_of
from rltrain.trainer.balance import Workload
from rltrain.trainer.plan import make_plan
from tests.tiny import save_tiny_model

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
SIZES = {"matmul_parameters": 5.0, "trained_parameters": 5.0, "attention_width": 0.0}
ONE = PassSpeed(flops=1.0, token_s=0.0, gather_s=0.0, micro_batch_s=0.0, sample_s=0.0, optimizer_s=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("simulate"))


@pytest.fixture
def settings(model):
    def of(*words):
        return load_config(
            [
                "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}", "data.train_batch_size=8",
                "data.max_prompt_length=32", "data.max_response_length=64", f"{A}ppo_mini_batch_size=4", f"{R}n=4",
                f"{A}use_kl_loss=True", f"{A}ppo_max_token_len_per_gpu=4096", "trainer.device=cuda",
                "trainer.n_gpus_per_node=2", f"{R}name=vllm", f"{R}tensor_model_parallel_size=1", *words,
            ]
        ).config  # fmt: skip

    return of


def timed(name, cfg, answers, speed=ONE):
    plan, answers = make_plan(cfg), np.array(answers)
    groups = np.arange(len(answers))
    work = Workload.of_groups(np.ones(len(answers), dtype=np.int64), answers, groups)
    return time_pass(name, [groups], work, plan, SIZES, speed)


def test_a_pass_takes_its_flops_of_the_busiest_rank(settings):
    # Of two ranks one has a text of 1 + 9 tokens, the other one of 1 + 2: 2 FLOPs a weight and token.
    seconds, parts = timed("old_log_prob", settings(), [9, 2])
    assert seconds == pytest.approx(2 * 5 * 10)
    # Both ranks equally busy would compute 2 * 5 * (10 + 3) / 2 s.
    assert parts == "1 micro-batch of a rank: compute 65.00, waiting 35.00, fixed 0.00 s"


def test_an_update_takes_three_times_that_and_its_fixed_times(settings):
    speed = replace(ONE, micro_batch_s=1000.0, optimizer_s=10_000.0)
    seconds, _ = timed("update_actor", settings(), [9, 2], speed)
    assert seconds == pytest.approx(3 * 2 * 5 * 10 + 1000 + 10_000)
    # Of the rank that has one of the two samples.
    speed = replace(ONE, sample_s=50.0)
    assert timed("update_actor", settings(), [9, 2], speed)[1].endswith("fixed 150.00 s")


def test_what_does_not_depend_on_flops_is_added_or_waited_for(settings):
    seconds, _ = timed("old_log_prob", settings(), [9, 2], replace(ONE, token_s=7.0))
    assert seconds == pytest.approx(2 * 5 * 10 + 7 * 10)
    assert timed("old_log_prob", settings(), [9, 2], replace(ONE, gather_s=500.0))[0] == 500
    assert timed("update_actor", settings(), [9, 2], replace(ONE, gather_s=500.0))[0] == 3 * 500


def test_a_budget_cuts_a_pass_into_micro_batches_as_in_a_run(settings):
    cfg = settings(f"{A}ppo_max_token_len_per_gpu=96", "trainer.n_gpus_per_node=1")
    parts = timed("ref", cfg, [60, 60, 60], replace(ONE, micro_batch_s=1.0))[1]
    assert parts.startswith("3 micro-batches of a rank: ")
    assert parts.endswith("fixed 3.00 s")


def test_passes_work_on_the_samples_that_a_run_gives_them(settings):
    cfg = settings()
    plan = make_plan(cfg)
    assert [len(ids) for ids in mini_batches_of("update_actor", cfg, plan, Assumptions())] == [16, 16]
    assert [len(ids) for ids in mini_batches_of("old_log_prob", cfg, plan, Assumptions())] == [16]
    assert [len(ids) for ids in mini_batches_of("ref", cfg, plan, Assumptions())] == [32]
    # Without a KL an update leaves out groups without a gradient.
    cfg = settings(f"{A}use_kl_loss=False")
    half = Assumptions(silent_share=0.5)
    assert sum(len(ids) for ids in mini_batches_of("update_actor", cfg, make_plan(cfg), half)) == 16


def test_phases_add_up_to_the_step(settings):
    cfg = settings()
    chip, lengths = find_chip("H100"), read_lengths("mean:20,max:64")
    found = foretell(cfg, make_plan(cfg), lengths, chip, Assumptions(reward_ms=2))
    outer = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor")
    assert found.step_s == pytest.approx(sum(found.seconds[name] for name in outer))
    assert found.seconds["gen"] == pytest.approx(found.seconds["generate_sequences"] + found.seconds["reshard"])
    assert found.seconds["reward"] == pytest.approx(32 * 0.002)
    assert found.throughput == pytest.approx(found.tokens / found.step_s / 2)


def test_a_critic_has_its_phases(settings):
    cfg = settings("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=4")
    found = foretell(cfg, make_plan(cfg), read_lengths("mean:20,max:64"), find_chip("H100"), Assumptions())
    assert {"values", "update_critic"} <= found.seconds.keys()


@pytest.mark.parametrize("merges", [True, False])
def test_adapters_that_travel_alone_are_told_to_be_no_part_of_it(settings, merges):
    cfg = settings("actor_rollout_ref.model.lora_rank=2", f"actor_rollout_ref.model.lora.merge={merges}")
    found = foretell(cfg, make_plan(cfg), read_lengths("mean:20,max:64"), find_chip("H100"), Assumptions())
    assert any("lora.merge=False" in text for text in found.left_out) is not merges


def test_sizes_are_those_that_workers_tell(settings):
    sizes = sizes_of(settings(), make_plan(settings()))
    assert sizes["matmul_parameters"] == sizes["ref_matmul_parameters"]
    # Two layers, two heads of 32; one head of keys and one of values.
    assert sizes["attention_width"] == 2 * 2 * 32
    assert sizes["cache_width"] == 2 * 2 * 32


def test_an_answer_that_has_no_room_names_the_key(settings):
    cfg = settings(f"{R}gpu_memory_utilization=0.5")
    sizes = sizes_of(cfg, make_plan(cfg))
    # In two bytes, the weights and the keys and values of 50 tokens.
    memory = int(2 * (sizes["num_parameters"] + 50 * sizes["cache_width"]) / 0.5)
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization=0.5: one answer of 96 tokens has no room in a cache of 50"
    ):
        foretell(cfg, make_plan(cfg), read_lengths("mean:20,max:64"), find_chip("H100"), Assumptions(), memory)


def test_a_dry_run_says_seconds_where_the_chip_is_known_and_nothing_on_a_cpu(settings, monkeypatch):
    cfg = settings()
    plan = make_plan(cfg)
    monkeypatch.setattr(Device, "count", property(lambda device: 1))
    monkeypatch.setattr(Device, "chip", lambda device: find_chip("NVIDIA H100 80GB HBM3"))
    (line,) = about_seconds(cfg, plan, None)
    assert line.startswith("about ")
    assert "not measured on this device" in line
    monkeypatch.setattr(Device, "chip", lambda device: None)
    assert about_seconds(cfg, plan, None) == []
    monkeypatch.undo()
    on_cpu = settings("trainer.device=cpu", f"{R}name=hf")
    assert about_seconds(on_cpu, make_plan(on_cpu), None) == []
