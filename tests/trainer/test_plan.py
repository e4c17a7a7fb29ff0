import pytest

from rltrain.base.errors import ConfigError
from rltrain.config.budgets import budgets
from rltrain.config.load import load_config
from rltrain.models.optim import learning_rate
from rltrain.run.report.plan import describe
from rltrain.trainer.plan import ImageSizes, PassBudget, make_plan

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
    assert counts.num_devices == 64
    assert counts.ranks["actor"] == 16
    assert counts.samples_per_step == 2048
    assert counts.optimizer_steps_per_step == 4
    assert counts.samples_per_mini_batch == 512
    assert counts.num_mini_batches == 4
    assert counts.num_engine_replicas == 32
    assert (counts.most_samples_per_rank, counts.samples_per_replica) == (128, 64)
    assert {counts.budgets[name] for name in ("update_actor", "old_log_prob", "ref")} == {PassBudget(120_000, None)}
    assert (counts.steps_per_epoch, counts.total_steps) == (7, 21)


def test_the_arithmetic_of_a_384_device_run():
    counts = plan(
        "data.train_batch_size=512", f"{A}actor.ppo_mini_batch_size=128", f"{A}rollout.n=16",
        f"{A}actor.ulysses_sequence_parallel_size=8", f"{A}actor.fsdp_config.fsdp_size=16",
        f"{A}rollout.tensor_model_parallel_size=4", f"{A}actor.ppo_max_token_len_per_gpu=5000", "trainer.nnodes=24",
        "trainer.n_gpus_per_node=16", "trainer.total_epochs=1", num_prompts=17000,
    )  # fmt: skip
    assert (counts.num_devices, counts.devices_per_copy, counts.ranks["actor"]) == (384, 16, 48)
    assert (counts.samples_per_step, counts.optimizer_steps_per_step, counts.samples_per_mini_batch) == (8192, 4, 2048)
    # 8192 / 48 and 512 / 96 are no whole numbers.
    assert (counts.num_engine_replicas, counts.most_samples_per_rank, counts.samples_per_replica) == (96, 171, 96)
    assert counts.budgets["update_actor"] == PassBudget(40_000, None)
    assert counts.num_reward_workers <= 64
    assert counts.steps_per_epoch == 33


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["trainer.n_gpus_per_node=8"], None),
        (
            [],
            "the weights of every layer, as 8 nodes share a copy (actor_rollout_ref.actor.fsdp_config."
            "fsdp_size=8, where memory allows: one in each node)",
        ),
        ([f"{A}actor.fsdp_config.fsdp_size=8"], "gradients, as there are 8 copies of the weights"),
        ([f"{A}actor.fsdp_config.fsdp_size=4"], "gradients, as there are 16 copies of the weights"),
        (
            [f"{A}actor.fsdp_config.fsdp_size=16", f"{A}actor.ulysses_sequence_parallel_size=16"],
            "gradients, as there are 4 copies of the weights; the weights of every layer, as 2 nodes share a copy "
            "(actor_rollout_ref.actor.fsdp_config.fsdp_size=8, where memory allows: one in each node); heads and "
            "tokens of every layer, as 2 nodes share a sequence",
        ),
        (
            [f"{A}actor.fsdp_config.fsdp_size=8", f"{A}rollout.tensor_model_parallel_size=32"],
            "gradients, as there are 8 copies of the weights; every layer of every token that is generated, as 4 nodes "
            "share an engine",
        ),
        (
            [
                f"{A}actor.fsdp_config.fsdp_size=8",
                "algorithm.adv_estimator=gae",
                "reward_model.enable=True",
                "reward_model.model.path=m",
            ],
            "gradients, as there are 8 copies of the weights; the weights of every layer of the critic, as 8 nodes "
            "share a copy (critic.model.fsdp_config.fsdp_size=8, where memory allows: one in each node); the weights "
            "of every layer of the reward model, as 8 nodes share a copy (reward_model.model.fsdp_config.fsdp_size=8, "
            "where memory allows: one in each node)",
        ),
        (
            [
                f"{A}actor.fsdp_config.fsdp_size=8",
                "algorithm.adv_estimator=gae",
                "algorithm.use_kl_in_reward=True",
                "critic.model.fsdp_config.fsdp_size=4",
                f"{A}ref.ulysses_sequence_parallel_size=16",
            ],
            "gradients, as there are 8 copies of the weights; heads and tokens of every layer of the reference, as 2 "
            "nodes share a sequence; gradients of the critic, as there are 16 copies of the weights",
        ),
    ],
)
def test_the_plan_says_what_goes_between_nodes(keys, said):
    nodes = ["trainer.n_gpus_per_node=8", *([] if said is None else ["trainer.nnodes=8"])]
    alone = [] if "algorithm.adv_estimator=gae" in keys else ["algorithm.adv_estimator=rloo", f"{A}rollout.n=2"]
    config = load_config([*nodes, *alone, *keys]).config
    rows = [line.split(maxsplit=2) for line in describe(make_plan(config), config).splitlines()]
    assert [row[2] for row in rows if row[:2] == ["between", "nodes"]] == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("key", "what"),
    [
        (f"{A}actor.ulysses_sequence_parallel_size", "sequences"),
        (f"{A}rollout.tensor_model_parallel_size", "engines"),
        (f"{A}actor.fsdp_config.fsdp_size", "copies of the weights"),
        ("critic.model.fsdp_config.fsdp_size", "copies of the weights"),
    ],
)
def test_what_spans_nodes_spans_whole_ones(key, what):
    """With 4 nodes of 6 devices, 4 and 8 divide the 24, and would lie on one node here and on two there."""
    for size in (4, 8):
        with pytest.raises(ConfigError) as caught:
            plan("trainer.nnodes=4", "trainer.n_gpus_per_node=6", f"{key}={size}")
        said = f"{key}={size} does not divide trainer.n_gpus_per_node=6: some {what} would span nodes, and others not."
        assert f"{said} Use one of 1, 2, 3, 6, or a multiple of 6." in str(caught.value)
    for size in (3, 12):
        plan("trainer.nnodes=4", "trainer.n_gpus_per_node=6", f"{key}={size}")


def test_models_may_differ_in_sequence_parallel_size():
    counts = plan(
        f"{A}actor.ulysses_sequence_parallel_size=4", f"{A}ref.ulysses_sequence_parallel_size=2",
        "algorithm.adv_estimator=gae", "critic.ulysses_sequence_parallel_size=8",
        f"{A}actor.ppo_max_token_len_per_gpu=1000", "trainer.n_gpus_per_node=8",
        f"{A}ref.log_prob_use_dynamic_bsz=False", f"{A}ref.log_prob_micro_batch_size_per_gpu=3",
    )  # fmt: skip
    assert [counts.ranks[role] for role in ("actor", "ref", "critic")] == [2, 4, 1]
    assert counts.budgets["update_actor"] == counts.budgets["old_log_prob"] == PassBudget(4000, None)
    assert counts.budgets["values"] == counts.budgets["update_critic"] == PassBudget(8000, None)
    assert counts.budgets["ref"] == PassBudget(None, 3)


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
        (["trainer.total_training_steps=500"], 16, 60, "until trainer.total_epochs=30, which comes before"),
        (["trainer.total_training_steps=500"], None, 500, "500, or 30 epochs (their length is known once"),
        ([], None, 0, "30 epochs (their length is known once"),
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
        (
            [f"{MICRO}=4"],
            {"update_actor": 1600, "old_log_prob": 1600, "ref": 1600, "update_critic": 1600, "values": 1600},
        ),
        ([f"{MICRO}=4", f"{TOKENS}=999"], {"update_actor": 1600, "old_log_prob": 1600, "update_critic": 1600}),
        ([f"{MICRO}=4", f"{DYNAMIC}=True", f"{TOKENS}=999"], {"update_actor": 999, "old_log_prob": 999, "values": 999}),
        (
            [f"{MICRO}=4", f"{DYNAMIC}=False", f"{TOKENS}=999"],
            {"update_actor": "4", "old_log_prob": "4", "values": "4"},
        ),
        (
            [f"{A}rollout.log_prob_micro_batch_size_per_gpu=2"],
            {"update_actor": 16384, "old_log_prob": 800, "ref": 16384},
        ),
        (
            [f"{MICRO}=4", f"{A}ref.log_prob_micro_batch_size_per_gpu=8", "critic.ppo_micro_batch_size_per_gpu=2"],
            {"update_actor": 1600, "old_log_prob": 1600, "ref": 3200, "update_critic": 800, "values": 800},
        ),
        (
            [f"{MICRO}=4", f"{A}rollout.log_prob_max_token_len_per_gpu=5000"],
            {"update_actor": 1600, "old_log_prob": 5000},
        ),
        ([f"{MICRO}=4", f"{A}rollout.log_prob_use_dynamic_bsz=True"], {"update_actor": 1600, "old_log_prob": 16384}),
        ([f"{MICRO}=4", "critic.use_dynamic_bsz=False"], {"update_actor": 1600, "update_critic": "4", "values": "4"}),
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


def test_the_plan_lists_budgets_of_passes_that_are_made():
    keys = [*LENGTHS, f"{MICRO}=4", "algorithm.adv_estimator=rloo", f"{A}rollout.n=2"]
    for more, rows in (
        ([], ["at most 1,600 tokens (4 x the longest) per data-parallel rank: old_log_prob, update_actor"]),
        (["algorithm.rollout_correction.bypass_mode=True"], ["at most 1,600 tokens (4 x the longest) per data-parallel "
                                                             "rank: update_actor"]),
        (
            [GAE, "critic.ppo_micro_batch_size_per_gpu=2", "critic.ulysses_sequence_parallel_size=2",
             "trainer.n_gpus_per_node=4"],
            ["at most 1,600 tokens (4 x the longest) per data-parallel rank: old_log_prob, update_actor",
             "at most 800 tokens (2 x the longest) per data-parallel rank, of which there are 2: values, "
             "update_critic"],
        ),
        (
            ["reward_model.enable=True", "reward_model.model.path=m", "reward_model.micro_batch_size_per_gpu=1"],
            ["at most 400 tokens (1 x the longest) per data-parallel rank: reward",
             "at most 1,600 tokens (4 x the longest) per data-parallel rank: old_log_prob, update_actor"],
        ),
    ):  # fmt: skip
        config = load_config([*keys, *more]).config
        lines = describe(make_plan(config), config).splitlines()
        assert [line.partition("micro-batch")[2].strip() for line in lines if "  micro-batch " in line] == rows


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], "before the first step and after the last: greedy"),
        (["val_kwargs.n=4"], "before the first step and after the last: greedy"),
        (["val_kwargs.n=4", "val_kwargs.temperature=0.6", "test_freq=5"],
         "before the first step, every 5 steps and after the last: 4 answers to each prompt at temperature 0.6"),
        (["test_freq=1", "val_before_train=False"], "every step and after the last: greedy"),
        (["val_only=True", "test_freq=5", "val_before_train=False"], "greedy"),
        (["val_before_train=False"], None),
    ],
)  # fmt: skip
def test_the_plan_says_how_validation_answers(keys, said):
    full = [(f"{A}rollout." if key.startswith("val_kw") else "trainer.") + key for key in keys]
    config = load_config([*full, "data.val_files=v.parquet"]).config
    rows = [
        line.split(None, 1)[1] for line in describe(make_plan(config), config).splitlines() if "  validation" in line
    ]
    assert rows == ([said] if said else [])
    config.data.val_files = None
    assert "  validation" not in describe(make_plan(config), config)


def test_the_plan_says_what_a_size_is_read_as():
    config = load_config([*LENGTHS, f"{MICRO}=4"]).config
    assert "at most 1,600 tokens (4 x the longest) per data-parallel rank" in describe(make_plan(config), config)


SIZES = ImageSizes(share=0.5, most_images=2, most_rows=80, most_tokens=20, mean_bytes=3 * 2**20)


@pytest.mark.parametrize(
    ("keys", "budget", "at_once"),
    [
        ([f"{MICRO}=4"], "1,600 tokens and 320 patches or tiles (4 x the longest)", 320),
        ([f"{A}actor.ppo_max_token_len_per_gpu=1000"], "1,000 tokens", 4000),
        ([f"{MICRO}=3", f"{A}actor.use_dynamic_bsz=False"], "3 samples", 240),
        ([f"{A}actor.ppo_max_token_len_per_gpu=1000", f"{A}actor.ppo_mini_batch_size=16"], "1,000 tokens", 1280),
    ],
    ids=["longest sequences", "tokens", "samples", "a small mini-batch"],
)
def test_the_plan_says_what_images_take(keys, budget, at_once):
    config = load_config([*LENGTHS, *keys]).config
    text = describe(make_plan(config, images=SIZES), config)
    assert f"at most {budget} per data-parallel rank" in text
    (row,) = [line for line in text.splitlines() if line.startswith("  images ")]
    assert "in 50% of the prompts, at most 2 images (80 patches or tiles, 20 tokens) in one" in row
    assert f"update_actor encodes up to {at_once:,} at once" in row
    assert row.endswith("pixels of a step: about 3,072.0 MiB")
    texts = describe(make_plan(config, images=ImageSizes()), config)
    assert texts == describe(make_plan(config), config)
    assert "images " not in texts


def test_micro_batches_by_count():
    counts = plan(
        f"{A}actor.use_dynamic_bsz=False", f"{A}actor.ppo_micro_batch_size_per_gpu=4",
        f"{A}ref.log_prob_micro_batch_size_per_gpu=5",
        "trainer.n_gpus_per_node=4",
    )  # fmt: skip
    assert counts.budgets["update_actor"] == PassBudget(None, 4)
    assert counts.budgets["old_log_prob"] == PassBudget(None, 4)
    assert counts.budgets["ref"] == PassBudget(None, 5)


def test_a_pass_without_a_size_takes_that_of_the_update():
    taking = (f"{A}rollout.log_prob_use_dynamic_bsz=False", "trainer.n_gpus_per_node=4")
    assert plan(*taking, f"{A}actor.ppo_micro_batch_size_per_gpu=3").budgets["old_log_prob"] == PassBudget(None, 3)


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
    counts = plan(*EIGHT, f"{A}rollout.n=3", "trainer.n_gpus_per_node=5")
    assert (counts.samples_per_step, counts.most_samples_per_rank, counts.samples_per_replica) == (24, 5, 6)


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
    counts = plan(*keys, f"{A}rollout.tail=oversample", f"{A}rollout.n=4", "trainer.n_gpus_per_node=1")
    assert (counts.prompts_started, counts.prompts_per_round, counts.samples_per_step) == (started, 10, 40)
    assert counts.samples_per_replica == 4 * started
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
        (192, ["trainer.n_gpus_per_node=8", "trainer.nnodes=2", "reward.judge.url=http://judge:80/v1"], 2),
        (2, ["reward.num_workers=7"], 7),
    ],
)
def test_answers_are_scored_on_the_cores_that_are_left(monkeypatch, cores, keys, workers):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr("rltrain.trainer.plan.cpu_quota", lambda: float("inf"))
    config = load_config(keys).config
    counts = make_plan(config)
    assert counts.num_reward_workers == workers
    assert f"  {workers} process" in describe(counts, config)


def test_defaults_that_are_not_verls():
    rollout = load_config([]).config.actor_rollout_ref.rollout
    assert (rollout.tensor_model_parallel_size, rollout.max_num_seqs) == (1, 256)


def test_the_learning_rate_by_hand():
    cfg = load_config([f"{A}actor.optim.lr=1.0", f"{A}actor.optim.lr_scheduler_type=cosine"]).config
    rates = [learning_rate(step, cfg.actor_rollout_ref.actor.optim, 3, 7) for step in range(8)]
    # 3 steps of warm-up in quarters, then half a wave over 4 steps.
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0])


def test_a_reference_pass_is_listed_where_a_reference_runs():
    keys = ["algorithm.adv_estimator=grpo", f"{A}rollout.n=4"]
    for more, listed in (
        ([], False),
        ([f"{A}actor.use_kl_loss=True"], True),
        (["algorithm.use_kl_in_reward=True"], True),
        ([f"{A}actor.use_kl_loss=True", f"{A}actor.kl_loss_type=full"], False),
    ):
        config = load_config([*keys, *more]).config
        assert ("old_log_prob, ref, update_actor\n" in describe(make_plan(config), config)) == listed


def test_longer_prompts_are_proposed_where_some_were_too_long():
    config = load_config(["algorithm.adv_estimator=grpo", f"{A}rollout.n=4"]).config
    with pytest.raises(ConfigError, match=r"20 prompts that are left to train on. Lower it\.$"):
        make_plan(config, 20)
    with pytest.raises(ConfigError, match=r"raise data.max_prompt_length \(7 are too long\)"):
        make_plan(config, 20, 7)
