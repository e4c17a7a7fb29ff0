"""Settings that change nothing are said to change nothing, and only those."""

import pytest

from rltrain.api import look_over
from rltrain.base.errors import ConfigError
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.notes import without_effect
from rltrain.config.schema.conditions import is_met
from rltrain.config.schema.declarations import ESTIMATORS, POLICY_LOSSES
from rltrain.config.schema.keys import all_keys

A = "actor_rollout_ref."
BASE = [f"{A}model.path=m", "data.train_files=t.parquet", "algorithm.adv_estimator=grpo", f"{A}rollout.n=4"]
VALIDATES_ALONE = ["data.val_files=v.parquet", "trainer.val_only=True"]


def notes(*overrides: str) -> list[str]:
    loaded = load_config([*BASE, *overrides])
    check(loaded)
    return [*loaded.warnings, *without_effect(loaded)]


def test_every_condition_of_a_key_can_be_read():
    config = load_config(BASE).config
    for key in all_keys().values():
        assert all(is_met(config, scope, condition) in (True, False) for scope, condition, _ in key.only_with), key.name


def test_estimators_and_losses_read_keys_that_exist():
    for section, table in (("algorithm.", ESTIMATORS), (f"{A}actor.", POLICY_LOSSES)):
        for traits in table.values():
            assert {section + name for name in traits.reads or ()} <= set(all_keys())


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("data.shuffle", True),
        ("data.val_files", False),
        ("data.shuffle=False", False),
        ("data.truncation=left|error", True),
        ("data.truncation!=left|error", False),
        ("data.seed>0 or data.shuffle=False", True),
        ("data.seed<1 or data.shuffle=False", False),
        ("trainer.total_training_steps=null", True),
    ],
)
def test_conditions_by_hand(condition, expected):
    assert is_met(load_config([]).config, "actor_rollout_ref.actor", condition) is expected


def test_a_condition_finds_keys_around_its_section():
    config = load_config([f"{A}actor.use_kl_loss=True"]).config
    assert is_met(config, "actor_rollout_ref.ref", "actor.use_kl_loss")
    assert is_met(config, "actor_rollout_ref.actor", "use_kl_loss")


def test_a_plain_command_has_no_notes():
    assert notes() == []


@pytest.mark.parametrize(
    ("key", "dead", "alive"),
    [
        (f"{A}actor.kl_loss_coef=0.1", [], [f"{A}actor.use_kl_loss=True"]),
        (f"{A}ref.fsdp_config.param_offload=True", [], [f"{A}actor.use_kl_loss=True"]),
        (
            f"{A}actor.clip_ratio=0.1",
            [f"{A}actor.clip_ratio_low=0.2", f"{A}actor.clip_ratio_high=0.3"],
            [f"{A}actor.clip_ratio_low=0.2"],
        ),
        (f"{A}actor.optim.min_lr_ratio=0.1", [], [f"{A}actor.optim.lr_scheduler_type=cosine"]),
        (f"{A}actor.optim.lr_warmup_steps_ratio=0.1", [f"{A}actor.optim.lr_warmup_steps=3"], []),
        (f"{A}rollout.val_kwargs.top_p=0.7", [], [f"{A}rollout.val_kwargs.temperature=1.0"]),
        ("trainer.resume_from_path=c/global_step_5", [], ["trainer.resume_mode=resume_path"]),
        ("trainer.test_freq=5", [], ["data.val_files=v.parquet"]),
        (f"{A}model.lora_alpha=32", [], [f"{A}model.lora_rank=8"]),
        (f"{A}model.exclude_modules=[o_proj]", [], [f"{A}model.lora_rank=8"]),
        (f"{A}model.lora_rank=8", [f"{A}model.lora_adapter_path=a"], []),
        (
            f"{A}ref.fsdp_config.param_offload=True",
            [f"{A}actor.use_kl_loss=True", f"{A}model.lora_rank=8"],
            [f"{A}actor.use_kl_loss=True"],
        ),
        (
            "critic.model.lora_alpha=8",
            ["algorithm.adv_estimator=gae"],
            ["algorithm.adv_estimator=gae", "critic.model.lora_rank=4"],
        ),
        ("algorithm.kl_ctrl.kl_coef=0.1", [], ["algorithm.use_kl_in_reward=True"]),
        ("algorithm.gamma=0.9", [], ["algorithm.adv_estimator=gae"]),
        (
            "reward_model.overlong_buffer.enable=True",
            [],
            ["reward_model.reward_manager=dapo", "reward_model.overlong_buffer.len=8"],
        ),
        (f"+{A}rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True", [], None),
        (f"{A}rollout.oversample_ratio=1.5", [], [f"{A}rollout.tail=oversample"]),
        (
            f"{A}rollout.tail_max_age=2",
            [f"{A}rollout.tail=oversample", f"{A}rollout.oversample_ratio=1"],
            [f"{A}rollout.tail=oversample"],
        ),
        (f"{A}rollout.tail_draft_tokens=2", [], [f"{A}rollout.tail=exact", f"{A}rollout.name=vllm"]),
        (f"+{A}rollout.engine_kwargs.vllm.block_size=32", [f"{A}rollout.name=sglang"], [f"{A}rollout.name=vllm"]),
        (f"{A}rollout.free_cache_engine=False", [], [f"{A}rollout.name=vllm"]),
        (f"{A}rollout.mode=async", [], [f"{A}rollout.mode=sync"]),
        (f"{A}model.use_fused_kernels=True", [], [f"{A}model.use_fused_kernels=False"]),
        (f"{A}rollout.load_format=dummy_dtensor", [], None),
        (f"{A}actor.optim.lr=1e-5", VALIDATES_ALONE, VALIDATES_ALONE[:1]),
        ("critic.optim.lr=1e-5", [*VALIDATES_ALONE, "algorithm.adv_estimator=gae"], ["algorithm.adv_estimator=gae"]),
        ("trainer.save_freq=5", VALIDATES_ALONE, []),
        ("trainer.test_freq=5", VALIDATES_ALONE, VALIDATES_ALONE[:1]),
        ("trainer.val_before_train=False", VALIDATES_ALONE, []),
        ("trainer.rollout_data_dir=answers", VALIDATES_ALONE, []),
        ("trainer.resume_weights_only=True", ["trainer.resume_mode=disable"], []),
        ("trainer.samples_max_prompts=5", ["trainer.samples_freq=-1"], []),
        ("trainer.hang_factor=9", ["trainer.hang_floor_s=null"], []),
        ("data.val_max_samples=5", [], VALIDATES_ALONE[:1]),
        (
            f"{A}actor.checkpoint.save_contents=[model]",
            [],
            [f"{A}actor.checkpoint.save_contents=[model,optimizer,extra]"],
        ),
    ],
)
def test_a_key_is_named_where_it_is_dead_and_only_there(key, dead, alive):
    name = key.partition("=")[0].lstrip("+")
    assert [note for note in notes(key, *dead) if note.startswith(f"{name}: no effect: ")]
    if alive is not None:
        assert not [note for note in notes(key, *alive) if note.startswith(f"{name}:")]


def test_each_key_is_named_once():
    tokens = f"{A}actor.use_dynamic_bsz=True"
    lines = notes(tokens, f"{A}ref.log_prob_micro_batch_size_per_gpu=1", f"{A}ref.use_torch_compile=True")
    assert [line.partition(":")[0] for line in lines] == [
        f"{A}ref.use_torch_compile",
        f"{A}ref.log_prob_micro_batch_size_per_gpu",
    ]


def test_weights_of_0_need_no_note():
    off = [f"{A}actor.kl_loss_coef=0.0", "algorithm.kl_ctrl.kl_coef=0", "trainer.critic_warmup=0"]
    assert notes(*off) == []
    assert len(notes(*[key.replace("=0", "=1") for key in off])) == 3


def test_keys_without_effect_for_one_reason_share_a_line():
    overlong = "reward.reward_kwargs.overlong_buffer_cfg."
    renamed = [f"{A}actor.grad_clip=1.0", f"{overlong}len=8", f"{overlong}penalty_factor=2"]
    of_ref = [f"{A}ref.log_prob_use_dynamic_bsz=True", f"{A}ref.fsdp_config.param_offload=True"]
    loaded = load_config([*BASE, *renamed, *of_ref])
    assert look_over(loaded) == [
        f"{A}actor.grad_clip is called {A}actor.optim.clip_grad here",
        f"{A}ref.fsdp_config.param_offload, {A}ref.log_prob_use_dynamic_bsz: no effect: there is no reference policy "
        "with use_kl_loss=False",
        f"{overlong}len, {overlong}penalty_factor: no effect: reward_model.reward_manager=naive; it counts with "
        "reward_manager=dapo",
    ]


def test_settings_of_the_reference_that_follow_the_actor_say_so():
    lines = notes(
        f"{A}actor.use_kl_loss=True", f"{A}ref.fsdp_config.model_dtype=bf16", f"{A}ref.fsdp_config.param_offload=True"
    )
    assert len(lines) == 1
    assert lines[0].startswith(f"{A}ref.fsdp_config.model_dtype: no effect: the reference is sharded")


def test_clip_ratio_alone_sets_both_sides():
    actor = load_config([f"{A}actor.clip_ratio=0.1"]).config.actor_rollout_ref.actor
    assert (actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, None, None)


def test_free_form_keys_may_have_words_of_refused_ones():
    kwargs = load_config(
        ["custom_reward_function.reward_kwargs.sandbox_fusion_url=u"]
    ).config.custom_reward_function.reward_kwargs
    assert kwargs == {"sandbox_fusion_url": "u"}
    with pytest.raises(ConfigError, match="calls your sandbox"):
        load_config(["reward_model.sandbox_fusion.url=u"])
