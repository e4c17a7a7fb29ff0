import pytest

from rltrain.config.load import load_config
from rltrain.errors import ConfigError
from rltrain.trainer.plan import PassBudget, describe, make_plan

A = "actor_rollout_ref."


EIGHT = ["data.train_batch_size=8", f"{A}actor.ppo_mini_batch_size=8"]


def plan(*overrides: str, num_prompts: int | None = None):
    return make_plan(load_config(list(overrides)).config, num_prompts)


def test_the_arithmetic_of_a_64_device_run():
    found = plan(
        "data.train_batch_size=128", f"{A}actor.ppo_mini_batch_size=32", f"{A}rollout.n=16",
        f"{A}actor.ulysses_sequence_parallel_size=4",
        f"{A}rollout.tensor_model_parallel_size=2", f"{A}actor.ppo_max_token_len_per_gpu=30000", "trainer.nnodes=8",
        "trainer.n_gpus_per_node=8", "trainer.total_epochs=3", num_prompts=1000,
    )  # fmt: skip
    assert found.num_devices == 64
    assert found.data_parallel_size == 16
    assert found.samples_per_step == 2048
    assert found.optimizer_steps_per_step == 4
    assert found.samples_per_mini_batch == 512
    assert found.num_mini_batches == 4
    assert found.num_engine_replicas == 32
    assert (found.most_samples_per_rank, found.samples_per_replica) == (128, 64)
    assert found.update_budget == found.log_prob_budget == found.ref_budget == PassBudget(120_000, None)
    assert (found.steps_per_epoch, found.total_steps) == (7, 21)


def test_models_may_differ_in_sequence_parallel_size():
    found = plan(
        f"{A}actor.ulysses_sequence_parallel_size=4", f"{A}ref.ulysses_sequence_parallel_size=2",
        "algorithm.adv_estimator=gae", "critic.ulysses_sequence_parallel_size=8",
        f"{A}actor.ppo_max_token_len_per_gpu=1000", "trainer.n_gpus_per_node=8",
        f"{A}ref.log_prob_use_dynamic_bsz=False", f"{A}ref.log_prob_micro_batch_size_per_gpu=3",
    )  # fmt: skip
    assert (found.data_parallel_size, found.ref_data_parallel_size, found.critic_data_parallel_size) == (2, 4, 1)
    assert found.update_budget == found.log_prob_budget == PassBudget(4000, None)
    assert found.values_budget == found.critic_budget == PassBudget(8000, None)
    assert found.ref_budget == PassBudget(None, 3)


def test_total_training_steps_wins_over_epochs():
    assert plan(*EIGHT, "trainer.total_training_steps=500", "trainer.total_epochs=1", num_prompts=16).total_steps == 500


def test_micro_batches_by_count():
    found = plan(
        f"{A}actor.use_dynamic_bsz=False", f"{A}actor.ppo_micro_batch_size_per_gpu=4",
        f"{A}ref.log_prob_micro_batch_size_per_gpu=5",
        "trainer.n_gpus_per_node=4",
    )  # fmt: skip
    assert found.update_budget == PassBudget(None, 4)
    assert found.log_prob_budget == PassBudget(None, 4)
    assert found.ref_budget == PassBudget(None, 5)


def test_a_pass_without_a_size_takes_that_of_the_update():
    taking = (f"{A}rollout.log_prob_use_dynamic_bsz=False", "trainer.n_gpus_per_node=4")
    assert plan(*taking, f"{A}actor.ppo_micro_batch_size_per_gpu=3").log_prob_budget == PassBudget(None, 3)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_batch_size=100", f"{A}actor.ppo_mini_batch_size=32"],
        ["data.train_batch_size=8", f"{A}actor.ppo_mini_batch_size=32"],
        [f"{A}actor.ulysses_sequence_parallel_size=3"],
        [f"{A}rollout.tensor_model_parallel_size=3"],
    ],
)
def test_nothing_is_rounded_in_silence(overrides):
    with pytest.raises(ConfigError, match=r"not a multiple|does not divide"):
        plan(*overrides)


def test_engines_get_whole_prompts_as_evenly_as_possible():
    found = plan(*EIGHT, f"{A}rollout.n=3", "trainer.n_gpus_per_node=5")
    assert (found.samples_per_step, found.most_samples_per_rank, found.samples_per_replica) == (24, 5, 6)


def test_epochs_over_the_same_batch_multiply_the_optimizer_steps():
    assert (
        plan(
            "data.train_batch_size=8", f"{A}actor.ppo_mini_batch_size=4", f"{A}actor.ppo_epochs=3"
        ).optimizer_steps_per_step
        == 6
    )


def test_warm_up_steps_or_their_share():
    steps = [*EIGHT, "trainer.total_training_steps=200"]
    assert plan(*steps, f"{A}actor.optim.lr_warmup_steps_ratio=0.05").lr_warmup_steps == 10
    assert (
        plan(*steps, f"{A}actor.optim.lr_warmup_steps_ratio=0.05", f"{A}actor.optim.lr_warmup_steps=3").lr_warmup_steps
        == 3
    )


def test_fewer_prompts_than_a_batch_is_an_error():
    with pytest.raises(ConfigError, match=r"data.train_batch_size=8 is more than the 7 prompts"):
        plan(*EIGHT, num_prompts=7)


def test_the_description_says_what_is_left_out_and_when_it_saves():
    config = load_config(EIGHT).config
    text = describe(make_plan(config, 20), config)
    assert "4 prompts of each left out" in text
    assert "at the end" in text
    never = load_config(["trainer.save_at_end=False"]).config
    assert "never" in describe(make_plan(never), never)


@pytest.mark.parametrize(("ratio", "started"), [(1.0, 10), (1.1, 11), (1.25, 13), (2.0, 20)])
def test_over_sampling_starts_more_prompts_than_a_step_needs(ratio, started):
    keys = ["data.train_batch_size=10", f"{A}actor.ppo_mini_batch_size=10", f"{A}rollout.oversample_ratio={ratio}"]
    found = plan(*keys, f"{A}rollout.tail=oversample", f"{A}rollout.n=4", "trainer.n_gpus_per_node=1")
    assert (found.prompts_started, found.prompts_per_round, found.samples_per_step) == (started, 10, 40)
    assert found.samples_per_replica == 4 * started
    assert plan(*keys).prompts_started == 10
    config = load_config([*keys, f"{A}rollout.tail=oversample"]).config
    assert f"{started} prompts are started; the step ends when 10 are answered" in describe(make_plan(config), config)


@pytest.mark.parametrize(
    ("cores", "keys", "workers"),
    [
        (2, ["trainer.n_gpus_per_node=1"], 1),
        (2, ["trainer.n_gpus_per_node=8"], 1),
        (12, ["trainer.n_gpus_per_node=8"], 4),
        (192, ["trainer.n_gpus_per_node=8"], 16),
        (192, ["trainer.n_gpus_per_node=8", "trainer.nnodes=8"], 64),
        (192, ["trainer.n_gpus_per_node=8", "trainer.nnodes=2", "reward.url=http://judge:80/"], 2),
        (2, ["reward.num_workers=7"], 7),
    ],
)
def test_answers_are_scored_on_the_cores_that_are_left(monkeypatch, cores, keys, workers):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr("rltrain.trainer.plan.cpu_quota", lambda: float("inf"))
    config = load_config(keys).config
    found = make_plan(config)
    assert found.num_reward_workers == workers
    assert f"  {workers} process" in describe(found, config)


def test_a_reference_pass_is_listed_where_a_reference_runs():
    keys = ["algorithm.adv_estimator=grpo", f"{A}rollout.n=4"]
    for more, listed in (
        ([], False),
        ([f"{A}actor.use_kl_loss=True"], True),
        (["algorithm.use_kl_in_reward=True"], True),
        ([f"{A}actor.use_kl_loss=True", f"{A}actor.kl_loss_type=full"], False),
    ):
        config = load_config([*keys, *more]).config
        assert ("micro-batch, ref" in describe(make_plan(config), config)) == listed


def test_longer_prompts_are_proposed_where_some_were_too_long():
    config = load_config(["algorithm.adv_estimator=grpo", f"{A}rollout.n=4"]).config
    with pytest.raises(ConfigError, match=r"20 prompts that are left to train on. Lower it\.$"):
        make_plan(config, 20)
    with pytest.raises(ConfigError, match=r"raise data.max_prompt_length \(7 are too long\)"):
        make_plan(config, 20, 7)
