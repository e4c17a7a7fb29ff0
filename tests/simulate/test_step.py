"""Passes checked by hand, and phases whose sum is the step."""

from dataclasses import replace

import numpy as np
import pytest

from rltrain.common.chips import find_chip
from rltrain.common.errors import ConfigError
from rltrain.config.load import load_config
from rltrain.models.vision import image_cost
from rltrain.run.estimate import plan_of
from rltrain.run.seconds.assumptions import Assumptions
from rltrain.run.seconds.lengths import read_lengths
from rltrain.run.seconds.step import PassSpeed, estimate_step, mini_batches_of, pass_speed, sizes_of, time_pass
from rltrain.trainer.batching.balance import Workload
from rltrain.trainer.plan import make_plan
from tests.tiny_vision import save_tiny_vision_model

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
SIZES = {"matmul_parameters": 5.0, "trained_parameters": 5.0, "attention_width": 0.0}
ONE = PassSpeed(flops=1.0, token_s=0.0, gather_s=0.0, micro_batch_s=0.0, sample_s=0.0, optimizer_s=0.0)


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


def test_passes_work_on_the_samples_that_a_run_gives_them(settings):
    cfg = settings()
    plan, keys = make_plan(cfg), (cfg.actor_rollout_ref.actor, cfg.critic.ppo_epochs, cfg.data.seed)
    assert [len(ids) for ids in mini_batches_of("update_actor", *keys, plan, Assumptions())] == [16, 16]
    assert [len(ids) for ids in mini_batches_of("old_log_prob", *keys, plan, Assumptions())] == [16]
    assert [len(ids) for ids in mini_batches_of("ref", *keys, plan, Assumptions())] == [32]
    # Without a KL an update leaves out groups without a gradient.
    cfg = settings(f"{A}use_kl_loss=False")
    half = Assumptions(silent_share=0.5)
    assert sum(len(ids) for ids in mini_batches_of("update_actor", *keys, make_plan(cfg), half)) == 16


def test_ranks_that_share_matrices_gather_their_parts_and_send_hidden_states(settings):
    four, chip, assumed = "trainer.n_gpus_per_node=4", find_chip("H100"), Assumptions()
    plain, shared = (settings(four, *words) for words in ((), (f"{A}fsdp_config.tensor_parallel_size=2",)))
    sizes = sizes_of(plain, make_plan(plain))
    assert sizes == sizes_of(shared, make_plan(shared))
    alone, pair = (
        pass_speed("old_log_prob", cfg, make_plan(cfg), sizes, chip, assumed, 1.0) for cfg in (plain, shared)
    )
    assert pair.flops == 2 * alone.flops
    # A device lacks three quarters of all weights, or a quarter of them: half of the half that it computes with.
    assert pair.gather_s == pytest.approx(alone.gather_s / 3)
    # Of the tiny model: two layers of width 32 with MLPs of 64, and 20 tokens.
    bandwidth = chip.peak_bandwidth * assumed.bandwidth_share
    assert alone.token_s == pytest.approx((2 * (40 * 32 + 14 * 64) + 24 * 20) / bandwidth)
    # Both devices read and write all of the width. Two all-reduces a layer send the width once, in two bytes.
    own_s = (2 * (40 * 32 + 14 * 32) + 24 * 10) / bandwidth
    assert pair.token_s == pytest.approx(own_s + 2 * 2 * 2 * 32 / (assumed.node_gb_per_s * 1e9))


def test_phases_add_up_to_the_step(settings):
    cfg = settings()
    chip, lengths = find_chip("H100"), read_lengths("mean:20,max:64")
    found = estimate_step(cfg, make_plan(cfg), lengths, chip, Assumptions(reward_ms=2))
    outer = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor")
    assert found.step_s == pytest.approx(sum(found.seconds[name] for name in outer))
    assert found.seconds["gen"] == pytest.approx(found.seconds["generate_sequences"] + found.seconds["reshard"])
    assert found.seconds["reward"] == pytest.approx(32 * 0.002)
    assert found.throughput == pytest.approx(found.tokens / found.step_s / 2)


def test_the_cost_of_images_is_their_flops_in_tokens():
    sizes = {"row_flops": 10.0, "pair_flops": 2.0, "matmul_parameters": 5.0, "backward_share": 0.5}
    rows, images = np.array([4, 0]), np.array([2, 0])
    # 4 rows, and 2 images of 2 x 2 pairs; a token takes 2 x 5 FLOPs.
    assert image_cost(sizes, rows, images, updates=False).tolist() == [(4 * 10 + 2 * 4 * 2) / 10, 0]
    # Half of the tower is frozen, so an update takes half as much in relation to its tokens.
    assert image_cost(sizes, rows, images, updates=True).tolist() == [(4 * 10 + 2 * 4 * 2) / 20, 0]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_a_tower_encodes_the_image_of_a_prompt_once_per_pass(settings, family, tmp_path):
    folder = save_tiny_vision_model(tmp_path, family, tied=False)
    cfg, lengths = settings(f"actor_rollout_ref.model.path={folder}"), read_lengths("mean:20,max:64,prompt:32,image:16")
    plan, chip, assumed = plan_of(cfg, lengths), find_chip("H100"), Assumptions()
    sizes = sizes_of(cfg, plan)
    assert plan.images.most_rows * sizes["row_tokens"] == 16
    # So many patches or tiles that the time of all else does not count.
    plan, rows = replace(plan, images=replace(plan.images, most_rows=10**9)), 10**9
    seconds = estimate_step(cfg, plan, lengths, chip, assumed).seconds
    tower = sizes["row_flops"] * rows + sizes["pair_flops"] * rows**2
    # Each of the two devices encodes 4 of the 8 prompts.
    forward_s = 4 * tower / (chip.peak_flops * assumed.forward_share)
    assert seconds["generate_sequences"] == pytest.approx(forward_s, rel=0.02)
    assert seconds["ref"] == pytest.approx(forward_s, rel=0.02)
    # Three forwards, and a fourth of gradient checkpointing.
    update_s = 4 * sizes["backward_share"] * 4 * tower / (chip.peak_flops * assumed.update_share)
    assert seconds["update_actor"] == pytest.approx(update_s, rel=0.02)


def test_an_answer_that_has_no_room_names_the_key(settings):
    cfg = settings(f"{R}gpu_memory_utilization=0.5")
    sizes = sizes_of(cfg, make_plan(cfg))
    # In two bytes, the weights and the keys and values of 50 tokens.
    memory = int(2 * (sizes["num_parameters"] + 50 * sizes["cache_width"]) / 0.5)
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization=0.5: a response of 96 tokens does not fit in a cache of 50"
    ):
        estimate_step(cfg, make_plan(cfg), read_lengths("mean:20,max:64"), find_chip("H100"), Assumptions(), memory)
