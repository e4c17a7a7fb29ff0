import pytest

from rltrain.common.errors import ConfigError
from rltrain.config.budgets import budgets
from rltrain.config.load import load_config
from rltrain.models.optim import learning_rate
from rltrain.run.report.plan import describe
from rltrain.trainer.plan import PassBudget, make_plan

A = "actor_rollout_ref."


EIGHT = ["data.train_batch_size=8", f"{A}actor.ppo_mini_batch_size=8"]


def plan(*overrides: str, num_prompts: int | None = None):
    return make_plan(load_config(list(overrides)).config, num_prompts)


def test_the_arithmetic_of_a_64_device_run():
    counts = plan(
        "data.train_batch_size=128", f"{A}actor.ppo_mini_batch_size=32", f"{A}rollout.n=16",
        f"{A}actor.ulysses_sequence_parallel_size=4",
        f"{A}rollout.tensor_model_parallel_size=2", f"{A}actor.ppo_max_token_len_per_gpu=30000", "trainer.nnodes=8",
        "trainer.n_gpus_per_node=8", "trainer.total_epochs=3", num_prompts=1000,
    )  # fmt: skip
    assert (counts.num_devices, counts.ranks["actor"], counts.num_engine_replicas) == (64, 16, 32)
    assert (counts.samples_per_step, counts.samples_per_mini_batch, counts.num_mini_batches) == (2048, 512, 4)
    assert counts.optimizer_steps_per_step == 4
    assert (counts.most_samples_per_rank, counts.samples_per_replica) == (128, 64)
    assert {counts.budgets[name] for name in ("update_actor", "old_log_prob", "ref")} == {PassBudget(120_000, None)}
    assert (counts.steps_per_epoch, counts.total_steps) == (7, 21)
    # Of sizes that do not divide evenly, engines get whole prompts.
    odd = plan(*EIGHT, f"{A}rollout.n=3", "trainer.n_gpus_per_node=5", f"{A}actor.ppo_epochs=3")
    assert (odd.samples_per_step, odd.most_samples_per_rank, odd.samples_per_replica) == (24, 5, 6)
    assert odd.optimizer_steps_per_step == 3


@pytest.mark.parametrize(
    ("key", "what"),
    [
        (f"{A}rollout.tensor_model_parallel_size", "engines"),
        (f"{A}actor.fsdp_config.fsdp_size", "copies of the weights"),
    ],
)
def test_what_spans_nodes_spans_whole_ones(key, what):
    """With 4 nodes of 6 devices, groups of 4 and 8 divide the 24, but some would lie on one node and others on two."""
    for size in (4, 8):
        with pytest.raises(ConfigError) as caught:
            plan("trainer.nnodes=4", "trainer.n_gpus_per_node=6", f"{key}={size}")
        said = f"{key}={size} does not divide trainer.n_gpus_per_node=6: some {what} would span nodes and others would"
        assert f"{said} not. Use one of 1, 2, 3, 6, or a multiple of 6." in str(caught.value)
    for size in (3, 12):
        plan("trainer.nnodes=4", "trainer.n_gpus_per_node=6", f"{key}={size}")


@pytest.mark.parametrize(
    ("keys", "num_prompts", "steps", "said"),
    [
        (["trainer.total_epochs=3"], 16, 6, "until trainer.total_epochs=3"),
        (["trainer.total_training_steps=5", "trainer.total_epochs=3"], 16, 5, "until trainer.total_training_steps=5"),
        (
            ["trainer.total_training_steps=500", "trainer.total_epochs=3"], 16, 6,
            "until trainer.total_epochs=3, which comes before trainer.total_training_steps=500 (for those set "
            "total_epochs=250)",
        ),
        (["trainer.total_training_steps=500"], None, 500, "500, or 30 epochs (their length is known once"),
    ],
)  # fmt: skip
def test_the_earlier_of_steps_and_epochs_ends_a_run(keys, num_prompts, steps, said):
    config = load_config([*EIGHT, *keys]).config
    counts = make_plan(config, num_prompts)
    assert counts.total_steps == steps
    assert said in describe(counts, config)


def test_the_schedule_has_the_steps_that_were_asked_for():
    ratio = f"{A}actor.optim.lr_warmup_steps_ratio=0.1"
    short = plan(*EIGHT, ratio, "trainer.total_training_steps=500", "trainer.total_epochs=3", num_prompts=16)
    assert (short.total_steps, short.schedule_steps, short.lr_warmup_steps) == (6, 500, 50)
    fixed = plan(*EIGHT, ratio, f"{A}actor.optim.lr_warmup_steps=3", num_prompts=16)
    assert fixed.lr_warmup_steps == 3
    epochs = plan(*EIGHT, ratio, "trainer.total_epochs=30", num_prompts=16)
    assert (epochs.total_steps, epochs.schedule_steps, epochs.lr_warmup_steps) == (60, 60, 6)


# A sequence has at most 100 + 300 tokens, so a size of 4 is 1,600 tokens.
LENGTHS = ("data.max_prompt_length=100", "data.max_response_length=300")
MICRO, TOKENS, DYNAMIC = (f"{A}actor.{name}" for name in (
    "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "use_dynamic_bsz"
))  # fmt: skip
GAE = "algorithm.adv_estimator=gae"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # pass -> tokens (an int) or samples (a text)
        ([], {"update_actor": 16384, "old_log_prob": 16384, "ref": 16384, "update_critic": 16384, "values": 16384}),
        ([f"{MICRO}=4", f"{TOKENS}=999"], {"update_actor": 1600, "old_log_prob": 1600, "update_critic": 1600}),
        ([f"{MICRO}=4", f"{DYNAMIC}=True", f"{TOKENS}=999"], {"update_actor": 999, "old_log_prob": 999, "values": 999}),
        ([f"{MICRO}=4", f"{DYNAMIC}=False"], {"update_actor": "4", "old_log_prob": "4", "values": "4"}),
        (
            [f"{MICRO}=4", f"{A}ref.log_prob_micro_batch_size_per_gpu=8", "critic.ppo_micro_batch_size_per_gpu=2"],
            {"update_actor": 1600, "old_log_prob": 1600, "ref": 3200, "update_critic": 800, "values": 800},
        ),
        ([f"{MICRO}=4", f"{A}rollout.log_prob_use_dynamic_bsz=True"], {"update_actor": 1600, "old_log_prob": 16384}),
        ([f"{MICRO}=3", f"{A}rollout.log_prob_use_dynamic_bsz=False"], {"update_actor": 1200, "old_log_prob": "3"}),
        ([f"{MICRO}=4", "reward_model.micro_batch_size_per_gpu=1"], {"update_actor": 1600, "reward": 400}),
        # Of a group that shares sequences a size counts once, as in verl; tokens count on each device.
        (
            [f"{MICRO}=4", f"{A}actor.ulysses_sequence_parallel_size=2", f"{A}ref.log_prob_max_token_len_per_gpu=500"],
            {"update_actor": 1600, "old_log_prob": 1600, "ref": 1000},
        ),
    ],
)
def test_a_written_size_never_takes_more_than_it_says(keys, expected):
    found = budgets(load_config([*LENGTHS, GAE, "trainer.n_gpus_per_node=2", *keys]).config)
    limits = {name: budget.max_tokens or str(budget.max_samples) for name, budget in found.items()}
    assert {name: limits[name] for name in expected} == expected


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


def test_fewer_prompts_than_a_batch_is_an_error_that_proposes_longer_ones():
    with pytest.raises(ConfigError, match=r"data.train_batch_size=8 is more than the 7 training prompts"):
        plan(*EIGHT, num_prompts=7)
    config = load_config(EIGHT).config
    with pytest.raises(ConfigError, match=r"raise data.max_prompt_length \(3 are too long\)"):
        make_plan(config, 7, 3)


def test_the_description_says_what_is_left_out_and_when_it_saves():
    config = load_config(EIGHT).config
    text = describe(make_plan(config, 20), config)
    assert "4 prompts of each left out" in text
    assert "at the end" in text


@pytest.mark.parametrize(("ratio", "started"), [(1.0, 10), (1.25, 13)])
def test_over_sampling_starts_more_prompts_than_a_step_needs(ratio, started):
    keys = ["data.train_batch_size=10", f"{A}actor.ppo_mini_batch_size=10", f"{A}rollout.oversample_ratio={ratio}"]
    counts = plan(*keys, f"{A}rollout.tail=oversample", f"{A}rollout.n=4", "trainer.n_gpus_per_node=1")
    assert (counts.prompts_started, counts.prompts_per_round, counts.samples_per_step) == (started, 10, 40)
    assert counts.samples_per_replica == 4 * started
    assert plan(*keys).prompts_started == 10
    config = load_config([*keys, f"{A}rollout.tail=oversample"]).config
    assert f"{started} prompts are started; the step ends when 10 are answered" in describe(make_plan(config), config)


@pytest.mark.parametrize(
    ("cores", "keys", "workers"),
    [
        (2, [], 1),
        (12, [], 4),
        (192, ["trainer.nnodes=8"], 64),
        (192, ["trainer.nnodes=2", "reward.judge.url=http://judge:80/v1"], 2),
        (2, ["reward.num_workers=7"], 7),
    ],
)
def test_answers_are_scored_on_the_cores_that_are_left(monkeypatch, cores, keys, workers):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr("rltrain.trainer.plan.cpu_quota", lambda: float("inf"))
    config = load_config(["trainer.n_gpus_per_node=8", *keys]).config
    assert make_plan(config).num_reward_workers == workers
    assert f"  {workers} process" in describe(make_plan(config), config)


def test_defaults_that_are_not_verls():
    rollout = load_config([]).config.actor_rollout_ref.rollout
    assert (rollout.tensor_model_parallel_size, rollout.max_num_seqs) == (1, 256)


def test_the_learning_rate_by_hand():
    cfg = load_config([f"{A}actor.optim.lr=1.0", f"{A}actor.optim.lr_scheduler_type=cosine"]).config
    rates = [learning_rate(step, cfg.actor_rollout_ref.actor.optim, 3, 7) for step in range(8)]
    # 3 steps of warm-up in quarters, then half a wave over 4 steps.
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0])
