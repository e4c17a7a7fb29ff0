"""The configuration a user types: spellings, mistakes, traps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.base.errors import ConfigError
from rltrain.config.budgets import PassBudget, budgets
from rltrain.config.check import check, missing_files
from rltrain.config.load import load_config, masked_command, to_yaml
from rltrain.config.notes import without_effect
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import all_keys, free_form_parent, get
from rltrain.config.verl.table import rows
from rltrain.trainer.plan import make_plan

A = "actor_rollout_ref."
# What every valid config needs.
BASE = [
    f"{A}model.path=m",
    "data.train_files=t.parquet",
    "algorithm.adv_estimator=grpo",
    f"{A}rollout.n=4",
    "trainer.n_gpus_per_node=8",
]
KEYS_FILE = Path(__file__).parent / "keys.txt"


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(load_config([*BASE, *overrides]))
    return str(caught.value)


def notes(*overrides: str) -> str:
    loaded = load_config([*BASE, *overrides])
    check(loaded)
    return "\n".join([*loaded.warnings, *without_effect(loaded)])


def test_the_list_of_keys_is_frozen():
    """Regenerate after a deliberate change: python -m tests.config.test_config"""
    assert sorted(all_keys()) == KEYS_FILE.read_text().split()


def test_every_key_has_a_help_text():
    assert [key.name for key in all_keys().values() if len(key.help) < 5] == []


def test_values_are_typed_and_later_wins(tmp_path):
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("data:\n  seed: 5\n  train_batch_size: 32\ntrainer:\n  logger: console\n")
    mine.write_text("data.seed: 6\n")
    loaded = load_config(
        ["data.train_batch_size=64", "data.train_batch_size=16", "+data.shuffle=False"], [str(base), str(mine)]
    )
    assert (loaded.config.data.seed, loaded.config.data.train_batch_size, loaded.config.data.shuffle) == (6, 16, False)
    assert loaded.config.trainer.logger == ["console"]
    assert {"data.seed", "data.train_batch_size", "data.shuffle", "trainer.logger"} <= loaded.explicit


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ('trainer.logger=["console","tensorboard"]', "trainer.logger", ["console", "tensorboard"]),
        ("trainer.logger=['console']", "trainer.logger", ["console"]),
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("data.train_files=['a.parquet','b.parquet']", "data.train_files", ["a.parquet", "b.parquet"]),
        (f"{A}actor.optim.lr=1e-6", f"{A}actor.optim.lr", 1e-6),
        (f"{A}rollout.temperature=1", f"{A}rollout.temperature", 1.0),
        ("trainer.total_training_steps=null", "trainer.total_training_steps", None),
        ("data.shuffle=false", "data.shuffle", False),
        ("++data.truncation=left", "data.truncation", "left"),
    ],
)
def test_yaml_flow_values(override, key, value):
    found = load_config([override]).config
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_a_wrong_key_is_answered_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"unknown key 'algorithm.adv_estimater': none of .*\. Did you mean algorithm.adv_estimator"
    ):
        load_config(["algorithm.adv_estimater=grpo"])
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.temperature"):
        load_config(["rollout.temperature=0.5"])


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config(
            ["data.sed=1", "data.train_batch_size=many", "data.truncation=center", f"{A}actor.ppo_micro_batch_size=8.5",
             "trainer.run=${trainer.nmae}", "oops", "trainer.logger=["]
        )  # fmt: skip
    assert [
        word in str(caught.value)
        for word in (
            "data.sed", "expected int, got str", "truncation=center: use one of error", "ppo_micro_batch_size_per_gpu.",
            "'oops' is not of the form", "not valid YAML",
        )
    ] == [True] * 6  # fmt: skip


def test_types_are_checked_without_guessing():
    with pytest.raises(ConfigError, match=r"data.seed=1.5: expected int, got float"):
        load_config(["data.seed=1.5"])


def test_a_value_may_follow_another_key():
    config = load_config(
        [
            "trainer.experiment_name=a",
            "trainer.default_local_dir=runs/${trainer.experiment_name}",
            f"{A}rollout.log_prob_max_token_len_per_gpu=${{data.max_prompt_length}}",
        ]
    ).config
    assert config.trainer.default_local_dir == "runs/a"
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 512
    with pytest.raises(ConfigError, match=r"trainer.default_local_dir: .*trainer.nmae"):
        load_config(["trainer.default_local_dir=runs/${trainer.nmae}"])


def test_a_section_may_be_given_as_a_mapping():
    loaded = load_config(
        [f"{A}actor.optim={{lr: 1e-5, weight_decay: 0.1}}", "reward.custom_reward_function={path: r.py}"]
    )
    optim = loaded.config.actor_rollout_ref.actor.optim
    assert (optim.lr, optim.weight_decay, optim.clip_grad) == (1e-5, 0.1, 1.0)
    assert loaded.config.custom_reward_function.path == "r.py"
    assert f"{A}actor.optim.lr" in loaded.explicit
    with pytest.raises(ConfigError, match=r"unknown key 'actor_rollout_ref.actor.optim.lrr'"):
        load_config([f"{A}actor.optim={{lrr: 1e-5}}"])
    with pytest.raises(ConfigError, match="'data' is a section"):
        load_config(["data=gsm8k"])


@pytest.mark.parametrize("name", ["007", "1e3", "true", "2024-01-01", "a=b"])
def test_a_name_that_looks_like_a_number_stays_as_it_is_written(name):
    assert load_config([f"trainer.experiment_name={name}"]).config.trainer.experiment_name == name


def test_free_form_dictionaries_take_any_key():
    config = load_config(
        [f"+{A}model.override_config.rope_theta=5.0", "custom_reward_function.reward_kwargs.mine.len=16"]
    ).config
    assert config.actor_rollout_ref.model.override_config == {"rope_theta": 5.0}
    assert config.custom_reward_function.reward_kwargs == {"mine": {"len": 16}}


def test_both_spellings_work_and_the_new_name_is_said():
    for key in (f"{A}actor.grad_clip", f"{A}actor.optim.clip_grad"):
        assert load_config([f"{key}=0.5"]).config.actor_rollout_ref.actor.optim.clip_grad == 0.5
    eps = load_config([f"{A}actor.optim.override_optimizer_config.eps=1e-5"]).config.actor_rollout_ref.actor.optim.eps
    assert eps == 1e-5
    assert f"{A}actor.grad_clip is called {A}actor.optim.clip_grad here" in notes(f"{A}actor.grad_clip=0.5")
    assert (
        load_config([f"{A}actor.optim.warmup_style=cosine"]).config.actor_rollout_ref.actor.optim.lr_scheduler_type
        == "cosine"
    )
    assert load_config(["reward.custom_reward_function.path=r.py"]).config.custom_reward_function.path == "r.py"
    assert load_config(["ray_init.num_cpus=3"]).config.ray_kwargs.ray_init["num_cpus"] == 3


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        (f"{A}actor.megatron.tensor_model_parallel_size", "ulysses_sequence_parallel_size"),
        (f"{A}ref.megatron.param_offload", "fsdp_config.param_offload"),
        (f"{A}actor.megatron.override_transformer_config.recompute_granularity", "enable_gradient_checkpointing"),
        ("hydra.run.dir", "--config FILE"),
        (f"{A}rollout.multi_turn.interaction_config_path", "a class with step"),
    ],
)
def test_a_key_of_another_backend_says_what_to_use(key, advice):
    with pytest.raises(ConfigError, match=advice):
        load_config([f"{key}=2"])


def test_the_rollout_and_reference_budgets_follow_the_actor():
    config = load_config([f"{A}actor.ppo_max_token_len_per_gpu=999", f"{A}actor.use_dynamic_bsz=True"]).config
    assert budgets(config)["ref"] == budgets(config)["old_log_prob"] == PassBudget(999, None)
    assert config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz


def test_keys_that_do_nothing_in_the_chosen_mode_say_so():
    tokens = (f"{A}actor.use_kl_loss=True", f"{A}actor.use_dynamic_bsz=True")
    dynamic = notes(*tokens, f"{A}actor.ppo_micro_batch_size_per_gpu=1", f"{A}ref.log_prob_micro_batch_size_per_gpu=1")
    assert f"{A}actor.ppo_micro_batch_size_per_gpu: no effect" in dynamic
    assert f"{A}ref.log_prob_micro_batch_size_per_gpu: no effect" in dynamic
    size_wins = notes(f"{A}actor.ppo_micro_batch_size_per_gpu=1", f"{A}actor.ppo_max_token_len_per_gpu=9999")
    assert size_wins == (
        f"{A}actor.ppo_max_token_len_per_gpu: no effect: {A}actor.use_dynamic_bsz is not set, so "
        f"{A}actor.ppo_micro_batch_size_per_gpu=1 decides"
    )
    taken_by_another = notes(f"{A}actor.ppo_micro_batch_size_per_gpu=1", f"{A}rollout.log_prob_use_dynamic_bsz=False")
    assert "ppo_micro_batch_size_per_gpu" not in taken_by_another
    counted = notes(
        f"{A}actor.use_dynamic_bsz=False",
        f"{A}actor.ppo_micro_batch_size_per_gpu=2",
        f"{A}actor.ppo_max_token_len_per_gpu=4096",
    )
    assert counted == (
        f"{A}actor.ppo_max_token_len_per_gpu: no effect: {A}actor.use_dynamic_bsz=False, so "
        f"{A}actor.ppo_micro_batch_size_per_gpu=2 decides"
    )
    assert "validation is greedy" in notes(f"{A}rollout.val_kwargs.n=8")
    greedy = notes(f"{A}rollout.val_kwargs.do_sample=False", f"{A}rollout.val_kwargs.temperature=0.6")
    assert greedy.startswith(f"{A}rollout.val_kwargs.temperature: no effect: validation is greedy with")
    assert notes(f"{A}rollout.val_kwargs.do_sample=True") == (
        f"{A}rollout.val_kwargs.do_sample: no effect: val_kwargs.temperature=0 is greedy"
    )
    assert notes(f"{A}rollout.val_kwargs.temperature=0.6", f"{A}rollout.val_kwargs.n=4") == ""
    assert "use_kl_loss=False" in notes(f"{A}actor.kl_loss_coef=0.1")
    assert f"{A}rollout.enforce_eager: no effect: the engine is rollout.name=hf" in notes(
        f"{A}rollout.enforce_eager=False"
    )
    for limit in ("gpu_memory_utilization=0.4", "max_num_batched_tokens=512", "max_model_len=2048"):
        assert notes(f"{A}rollout.{limit}") == ""
    assert "no effect: there is no critic" in notes("critic.optim.lr=1e-5").replace(
        "critic.optim.lr has no effect:", "no effect:"
    )
    assert notes(f"{A}model.use_remove_padding=True", "trainer.balance_batch=True") == ""
    assert notes(f"{A}model.use_remove_padding=False").startswith(f"{A}model.use_remove_padding: no effect")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.train_batch_size=100", f"{A}actor.ppo_mini_batch_size=32"], f"Try {A}actor.ppo_mini_batch_size=25"),
        ([f"{A}rollout.n=1", "algorithm.adv_estimator=grpo_passk"], f"Try {A}rollout.n=8"),
        ([f"{A}rollout.temperature=0"], "rollout.temperature=0.0: it must be over 0"),
        ([f"{A}rollout.do_sample=False"], "makes all answers to a prompt alike"),
        (["data.max_response_length=20000"], "Set it to at least 20512"),
        ([f"{A}actor.use_dynamic_bsz=False"], "needs actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        (["data.truncation=center"], "use one of error, left, right, middle"),
        (
            ["trainer.logger=tensorbord"],
            "'tensorbord' is not known; use one of console, file, tensorboard, wandb, mlflow",
        ),
        ([f"{A}rollout.top_p=0"], "over 0 and at most 1"),
        (["trainer.n_gpus_per_node=0"], "at least 1"),
        (["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        ([f"{A}model.path=''"], "model.path is not set"),
        (["data.train_files=null"], "data.train_files is not set"),
        ([f"{A}actor.ulysses_sequence_parallel_size=3"], "does not divide the 8 devices"),
        (["critic.ulysses_sequence_parallel_size=3"], "critic.ulysses_sequence_parallel_size=3 does not divide"),
        (
            [f"{A}actor.ulysses_sequence_parallel_size=2", "data.max_response_length=40000"],
            "= 40512 tokens over 2 devices. Set it to at least 20256",
        ),
        (
            [
                f"{A}actor.ulysses_sequence_parallel_size=2",
                f"{A}ref.ulysses_sequence_parallel_size=4",
                f"{A}actor.use_kl_loss=True",
                f"{A}actor.kl_loss_type=full",
            ],
            "Use actor_rollout_ref.ref.ulysses_sequence_parallel_size=2, as the actor",
        ),
        ([f"{A}actor.fsdp_config.fsdp_size=3"], "fsdp_size=3 does not divide the 8 devices"),
        ([f"{A}actor.ppo_mini_batch_size=0"], "ppo_mini_batch_size=0: it must be at least 1"),
        (["data.train_batch_size=-4"], "train_batch_size=-4: it must be at least 1"),
        (
            [f"{A}rollout.log_prob_use_dynamic_bsz=False"],
            "needs actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        ),
        (["critic.ppo_micro_batch_size=many"], "at least 1, or critic.ppo_micro_batch_size_per_gpu."),
        (["reward_model.micro_batch_size=0"], "at least 1, or reward_model.micro_batch_size_per_gpu."),
        ([f"{A}rollout.log_prob_micro_batch_size_per_gpu=0"], "at least 1"),
        ([f"{A}actor.optim.lr=.nan"], "lr=nan: it must be a finite number, at least 0"),
        ([f"{A}actor.optim.betas=[2,3]"], "betas=[2.0, 3.0]: give two numbers"),
        ([f"{A}actor.optim.clip_grad=0"], "clip_grad=0.0: it must be over 0"),
        (["+data.apply_chat_template_kwargs={truncation:true,max_length:9}"], "kwargs.truncation=True: see data.trunc"),
        (["+data.apply_chat_template_kwargs.add_generation_prompt=False"], "it is always true, as the model is to"),
        (["+data.apply_chat_template_kwargs.chat_template=x"], "see actor_rollout_ref.model.custom_chat_template"),
        (["+data.apply_chat_template_kwargs.padding=max_length"], "prompts are packed without padding. Leave it out"),
        (["critic.optim.eps=0"], "critic.optim.eps=0.0: it must be over 0. Try 1e-08"),
        ([f"{A}actor.optim.lr_warmup_steps_ratio=5"], "between 0 and 1"),
        ([f"{A}actor.clip_ratio_low=-1"], "at least 0"),
        ([f"{A}actor.fsdp_config.model_dtype=half"], "use one of auto, float32"),
        ([f"{A}rollout.dtype=half"], "use one of auto, float32"),
        ([f"{A}rollout.val_kwargs.temperature=-1"], "at least 0"),
        (
            [f"{A}actor.checkpoint.save_contents=[weights]"],
            "'weights' is not known; use one of model, optimizer, extra, hf_model",
        ),
        (["critic.optim.betas=[0.9]"], "critic.optim.betas=[0.9]: give two numbers"),
        (["critic.model.fsdp_config.fsdp_size=3"], "critic.model.fsdp_config.fsdp_size=3 does not divide"),
        (["reward_model.enable=True"], "needs reward_model.model.path"),
        (["reward_model.enable=True", "reward_model.rule_weight=0", "reward_model.weight=0"], "leave no reward at all"),
        (
            ["reward_model.enable=True", "reward_model.rule_weight=0", "data.sampler.name=solve_rate"],
            "solve_rate needs a scorer",
        ),
        (["reward_model.reward_manager=batch"], "batch needs custom_reward_function.path"),
        (["reward.weights.acc=much"], "reward.weights.acc=much: give a number"),
        (["algorithm.adv_estimator=gdpo"], "needs algorithm.gdpo_reward_keys"),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc]", "algorithm.use_kl_in_reward=True"],
            "algorithm.use_kl_in_reward would be lost",
        ),
        (["algorithm.filter_groups.enable=True", "data.gen_batch_size=1"], "Set gen_batch_size to at least 11"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], "neither a number nor low_high"),
        (
            ["algorithm.adv_estimator=optimal_token_baseline", "algorithm.rollout_correction.bypass_mode=True"],
            "reads the old policy at every token",
        ),
        (["algorithm.adv_estimator=gae", "trainer.critic_warmup=9", "trainer.total_training_steps=5"], "never learn"),
        (["algorithm.adv_estimator=gae", "critic.use_dynamic_bsz=False"], "critic.use_dynamic_bsz=False needs"),
        (["trainer.val_only=True"], "has nothing to do"),
        ([f"{A}model.lora_rank=-1"], "model.lora_rank=-1: it must be at least 0"),
        ([f"{A}model.lora_rank=8", f"{A}model.lora_alpha=0"], "model.lora_alpha=0.0: it must be over 0. Try 16"),
        ([f"{A}model.lora_rank=8", f"{A}model.target_modules=[]"], "model.target_modules=[]: give a name"),
        ([f"{A}model.lora_rank=8", f"{A}model.exclude_modules=[3]"], "model.exclude_modules=[3]: give a name"),
        (["critic.model.lora_rank=8", "critic.model.target_modules=[]"], "critic.model.target_modules=[]"),
        (
            [f"{A}rollout.name=hf", f"{A}rollout.tensor_model_parallel_size=2"],
            "an engine of rollout.name=hf runs on one device. Use 1, or rollout.name=vllm or rollout.name=sglang",
        ),
        (
            [
                f"{A}rollout.name=sglang",
                f"{A}rollout.tensor_model_parallel_size=16",
                "trainer.n_gpus_per_node=8",
                "trainer.nnodes=2",
            ],
            "is more than trainer.n_gpus_per_node=8, and an engine of rollout.name=sglang stays on one node",
        ),
        ([f"{A}rollout.tail=exact"], "rollout.name=hf does not have. Use rollout.name=vllm"),
        ([f"{A}rollout.name=vllm", f"{A}rollout.temperature=2.5"], "vllm takes 0.01 to 2"),
        ([f"+{A}rollout.engine_kwargs.hf.x=1"], "engine_kwargs.vllm or engine_kwargs.sglang"),
        ([f"{A}actor.tau_pos=0"], "actor.tau_pos=0.0: it must be over 0"),
        ([f"{A}actor.entropy_coeff=.nan"], "entropy_coeff=nan"),
    ],
)
def test_rules_between_keys(overrides, words):
    assert words in problems(*overrides)


@pytest.mark.parametrize(
    ("section", "role", "names"),
    [
        (f"{A}actor.fsdp_config", f"{A}actor.fsdp_config", ("param_offload", "optimizer_offload")),
        (f"{A}ref.fsdp_config", f"{A}ref.fsdp_config", ("param_offload",)),
        ("critic.fsdp", "critic.model.fsdp_config", ("param_offload", "optimizer_offload")),
        ("reward_model.model.fsdp_config", "reward_model.model.fsdp_config", ("param_offload",)),
    ],
)
def test_an_offload_policy_turns_both_offloads_on(section, role, names):
    offloads = [key for key in all_keys() if key.endswith("_offload")]
    policy = f"{section}.offload_policy"
    for keys in ([f"{policy}=True"], [f"{policy}=True", f"{role}.param_offload=False"]):
        loaded = load_config(keys)
        assert {key for key in offloads if get(loaded.config, key)} == {f"{role}.{name}" for name in names}
        assert loaded.warnings == (f"{policy} turns on {' and '.join(names)} here",)
    for off in ("False", "null"):
        loaded = load_config([f"{policy}={off}"])
        assert not [key for key in offloads if get(loaded.config, key)]
        assert not loaded.warnings


def test_what_an_engine_would_not_share_with_the_trainer():
    vllm = (f"{A}rollout.name=vllm", f"+{A}rollout.engine_kwargs.vllm.quantization=fp8")
    assert f"{A}rollout.engine_kwargs.vllm.quantization=fp8: the engine is given the trainer's weights" in problems(
        *vllm
    )
    pixels = f"{A}rollout.engine_kwargs.vllm.mm_device_do_normalize"
    assert f"{pixels}=True: images come as the trainer sees them" in problems(vllm[0], f"+{pixels}=True")
    assert pixels not in notes(vllm[0], f"+{pixels}=False")
    for given, way_out in {
        "limit_mm_per_prompt.image=1": "are actor_rollout_ref.rollout.limit_images=N",
        "limit_mm_per_prompt={image: 5, video: 0}": "are actor_rollout_ref.rollout.limit_images=N",
        "mm_processor_kwargs.max_pixels=200704": "data.min_pixels and data.max_pixels bound them",
        "language_model_only=True": "leaves the vision tower out by itself",
    }.items():
        assert way_out in problems(vllm[0], f"+{A}rollout.engine_kwargs.vllm.{given}")
    load_config([vllm[0], f"+{A}rollout.engine_kwargs.vllm.language_model_only=False"])
    # What is off is said to no engine: null would undo what the adapter sets.
    assert ENGINES["vllm"].handed_on({"limit_mm_per_prompt": None, "swap_space": 4, "seed": 3}) == {"seed": 3}
    with pytest.raises(ConfigError, match=r"rollout.quantization=fp8: the engine is given"):
        load_config([f"{A}rollout.quantization=fp8"])
    sizes = (f"{A}rollout.name=vllm", f"{A}rollout.cudagraph_capture_sizes=[1,2,4]")
    loaded = load_config(sizes)
    assert loaded.config.actor_rollout_ref.rollout.engine_kwargs == {"vllm": {"cudagraph_capture_sizes": [1, 2, 4]}}
    off = [f"{A}rollout.quantization=null", f"{A}rollout.cudagraph_capture_sizes=null"]
    assert load_config([*off, f"{A}rollout.name=vllm"]).config.actor_rollout_ref.rollout.engine_kwargs == {}


TRAINING_ALONE = [
    [f"{A}actor.ppo_max_token_len_per_gpu=16"],
    [f"{A}ref.log_prob_max_token_len_per_gpu=16"],
    ["algorithm.adv_estimator=gae", "critic.ppo_max_token_len_per_gpu=16"],
    [f"{A}actor.use_dynamic_bsz=False"],
    [f"{A}ref.ulysses_sequence_parallel_size=3"],
    ["critic.model.fsdp_config.fsdp_size=3", "critic.ulysses_sequence_parallel_size=3"],
    ["trainer.total_training_steps=0"],
    ["trainer.total_epochs=0"],
    [f"{A}rollout.tail=carry_over"],
    [f"{A}rollout.n=1", "algorithm.adv_estimator=grpo_passk"],
    [f"{A}rollout.do_sample=False"],
    [f"{A}actor.ppo_mini_batch_size=3"],
    [f"{A}actor.fsdp_config.model_dtype=float16"],
    ["algorithm.adv_estimator=gdpo"],
    [
        "reward_model.enable=True",
        "reward_model.rule_weight=0",
        "reward_model.model.path=m",
        "data.sampler.name=solve_rate",
    ],
    ["algorithm.adv_estimator=gae", "trainer.critic_warmup=9", "trainer.total_training_steps=5"],
    ["algorithm.adv_estimator=gae", "critic.model.lora_rank=8", "critic.model.target_modules=[]"],
    ["algorithm.rollout_correction.rollout_rs=token_k1"],
]


@pytest.mark.parametrize("overrides", TRAINING_ALONE, ids=" ".join)
def test_what_a_step_alone_needs_is_no_rule_of_an_evaluation(overrides):
    assert problems(*overrides)
    evaluation = load_config([*BASE, *overrides, "trainer.val_only=True", "data.val_files=v.parquet"])
    check(evaluation)
    make_plan(evaluation.config)


def test_several_broken_rules_come_together():
    text = problems(
        "algorithm.adv_estimator=grpo_passk", f"{A}rollout.n=1", f"{A}rollout.name=vlm", "reward.num_workers=0"
    )
    assert all(word in text for word in ("rollout.n must be", "rollout.name=vlm", "reward.num_workers"))


TOOLS = f"{A}rollout.multi_turn.function_tool_path=tools.py"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{A}rollout.agent.default_agent_loop=tool_agent"], "there are no tools. Name the file"),
        ([TOOLS, f"{A}rollout.multi_turn.enable=False", f"{A}rollout.agent.default_agent_loop=tool_agent"], "no tools"),
        (
            [f"{A}rollout.agent.default_agent_loop=my_agent"],
            "there is no such agent. Use single_turn_agent, tool_agent",
        ),
        ([TOOLS, "reward_model.enable=True", "reward_model.model.path=m"], "it would judge the words of tools"),
        ([TOOLS, f"{A}rollout.multi_turn.max_user_turns=2"], "use multi_turn.max_assistant_turns"),
        ([TOOLS, f"{A}rollout.multi_turn.tool_response_truncate_side=both"], "use one of left, middle, right"),
    ],
)
def test_what_several_turns_need_and_cannot_stand_beside(overrides, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(load_config([*BASE, *overrides]))


def test_several_turns_that_are_off_are_no_news():
    assert load_config([f"{A}rollout.multi_turn.enable=False"]).warnings == ()
    assert "multi_turn.max_assistant_turns: no effect" in notes(f"{A}rollout.multi_turn.max_assistant_turns=3")
    check(load_config([*BASE, TOOLS]))


@pytest.mark.parametrize(
    ("words", "size", "ranks"),
    [
        ([f"{A}actor.ppo_micro_batch_size=16"], 2, 8),
        ([f"{A}actor.ppo_micro_batch_size=16", f"{A}actor.ulysses_sequence_parallel_size=2"], 4, 4),
        ([f"{A}rollout.log_prob_micro_batch_size=64", "trainer.nnodes=2"], 4, 16),
        ([f"{A}ref.log_prob_micro_batch_size=3", f"{A}ref.ulysses_sequence_parallel_size=4"], 1, 2),
        (["critic.ppo_micro_batch_size=32", "critic.ulysses_sequence_parallel_size=2"], 8, 4),
        (["critic.forward_micro_batch_size=4"], 1, 8),
        (["reward_model.micro_batch_size=8", f"{A}actor.ulysses_sequence_parallel_size=2"], 1, 8),
    ],
)
def test_a_size_over_all_ranks_is_divided_by_them(words, size, ranks):
    loaded = load_config([*words, "trainer.n_gpus_per_node=8"])
    key, _, total = words[0].partition("=")
    assert get(loaded.config, f"{key}_per_gpu") == size
    rounded = "" if size * ranks == int(total) else " (rounded, as in verl)"
    assert f"{key}={total} over {ranks} ranks is {key}_per_gpu={size} here{rounded}" in loaded.warnings
    for order in ([*words, f"{key}_per_gpu=5"], [f"{key}_per_gpu=5", *words]):
        loaded = load_config([*order, "trainer.n_gpus_per_node=8"])
        assert get(loaded.config, f"{key}_per_gpu") == 5
        assert f"{key}: no effect: {key}_per_gpu is set too" in loaded.warnings


def test_a_total_over_all_ranks_may_be_null():
    assert (
        load_config([f"{A}rollout.log_prob_micro_batch_size=null", "critic.ppo_micro_batch_size=null"]).warnings == ()
    )
    assert load_config([f"{A}actor.ppo_micro_batch_size=8", f"{A}actor.ppo_micro_batch_size=null"]).explicit == set()


@pytest.mark.parametrize("name", [row.key for row in rows("no effect")])
def test_no_ignored_key_is_a_key_of_the_schema(name):
    assert name not in all_keys()
    assert free_form_parent(name.rstrip("*")) is None


@pytest.mark.parametrize("key", sorted(all_keys()))
def test_null_is_taken_or_refused_by_name(key):
    problem = ""
    try:
        loaded = load_config([*BASE, f"{key}=null"])
        check(loaded)
        without_effect(loaded)
        budgets(loaded.config)
    except ConfigError as error:
        problem = str(error)
    assert not problem or key in problem


def test_a_missing_file_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "train.parquet").touch()
    lines = missing_files(load_config([*BASE, f"data.train_files={tmp_path}/trian.parquet"]).config)
    assert lines == [
        f"data.train_files: {tmp_path}/trian.parquet does not exist. Did you mean {tmp_path}/train.parquet?"
    ]


def test_headers_of_the_remote_scorer_are_masked(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "abc")
    loaded = load_config(
        ["reward.url_headers.Authorization='Bearer ${oc.env:JUDGE_TOKEN}'", "reward.url_headers.X-Me=me"]
    )
    assert loaded.config.reward.url_headers == {"Authorization": "Bearer abc", "X-Me": "me"}
    assert "Bearer" not in to_yaml(loaded.config)
    assert "me" not in to_yaml(loaded.config).split("url_headers")[1].split()
    assert "abc" not in masked_command(
        ["python", "reward.url_headers.Authorization=abc", "reward.url_headers.X-Me=abc"]
    )


def test_secrets_are_masked_and_lengths_are_not():
    secrets = [
        f"custom_reward_function.reward_kwargs.{name}=abc123" for name in ("api_key", "hf_token", "token", "Password")
    ]
    config = load_config([*BASE, *secrets, "custom_reward_function.reward_kwargs.tokenizer=t5"]).config
    text = to_yaml(config)
    assert "abc123" not in text
    assert "tokenizer: t5" in text
    assert "ppo_max_token_len_per_gpu: 16384" in text
    assert "default_local_dir: checkpoints/rltrain/run" in text


def test_a_printed_config_can_be_read_back(tmp_path):
    config = load_config([*BASE, f"{A}model.override_config.rope_theta=5.0"]).config
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_config([], [str(file)]).config == config


def test_help_needs_neither_torch_nor_ray_nor_omegaconf():
    code = (
        "import sys; from rltrain.main_ppo import main; main(['--help']); "
        "heavy = {'torch', 'ray', 'transformers', 'omegaconf'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "actor_rollout_ref.rollout" in process.stdout


def test_path_and_name_of_a_class_are_one_key():
    loaded = load_config(["data.custom_cls.path=pkg://my.data", "data.custom_cls.name=Mine", "+data.my.key=3"])
    assert (loaded.config.data.custom_cls, loaded.config.data.own_keys) == ("pkg://my.data:Mine", {"my": {"key": 3}})
    loaded = load_config(["data.sampler.class_path=a.py", "data.sampler.class_name=B", "data.sampler.group_key=x"])
    assert (loaded.config.data.sampler.name, loaded.config.data.own_keys) == ("a.py:B", {"sampler": {"group_key": "x"}})
    assert "say with data.custom_cls.name which class of it" in problems("data.custom_cls.path=a.py")
    assert "name the file and what is in it, FILE.py:NAME" in problems("data.custom_cls=a.py")


def test_classes_that_are_not_chosen_are_nothing(tmp_path):
    (tmp_path / "saved.yaml").write_text(
        "data: {custom_cls: {path: null, name: null}, sampler: {class_path: null, class_name: null}, "
        "datagen: {path: null, name: null}}\n"
        "reward: {reward_manager: {source: register, name: naive, module: {path: null, name: custom_reward_manager}}}\n"
    )
    loaded = load_config([*BASE], [str(tmp_path / "saved.yaml")])
    assert (loaded.config.data.custom_cls, loaded.config.data.sampler.name) == (None, "shuffle")
    assert loaded.warnings == ("reward.reward_manager.name is called reward_model.reward_manager here",)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.my_key=3", "unknown key 'data.my_key'"),
        ("data.datagen.path=a.py", "data.datagen.path=a.py: rows are read once, before the first step"),
        ("reward.reward_manager.source=importlib", "reads verl's batch of tensors"),
        ("reward_manager.source=importlib", "custom_reward_function.path and name"),
        ("reward_model.reward_loop_source=importlib", "reward_model.reward_manager=batch"),
    ],
)
def test_code_that_cannot_be_kept_is_refused_with_the_way_out(override, words):
    assert words in problems(override)


def test_a_mistyped_key_is_no_key_of_a_class():
    assert "Did you mean data.shuffle?" in problems("data.custom_cls=a.py:B", "data.suffle=False")


@pytest.mark.parametrize("text", ["trainer: !!python/object/apply:os.mkdir ['{0}']", "a: !!python/name:os.system ''"])
def test_a_config_file_runs_nothing(tmp_path, text):
    (tmp_path / "hostile.yaml").write_text(text.format(tmp_path / "it_ran"))
    for arguments in (
        ([], [str(tmp_path / "hostile.yaml")]),
        # What stands in no brackets is a text on the command line.
        ([text.format(tmp_path / "it_ran").replace(": ", "=[", 1) + "]"],),
    ):
        with pytest.raises(ConfigError, match="python/"):
            load_config(*arguments)
    assert not (tmp_path / "it_ran").exists()


if __name__ == "__main__":
    KEYS_FILE.write_text("\n".join(sorted(all_keys())) + "\n")
