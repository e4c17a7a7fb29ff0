"""Notes on settings without effect; all others have none."""

import pytest

from rltrain.config.load import load_config
from rltrain.config.notes import without_effect
from rltrain.config.schema.conditions import is_met
from rltrain.config.schema.declarations import ESTIMATORS, POLICY_LOSSES
from rltrain.config.schema.keys import all_keys, get
from tests.config.commands import BASE, A, notes, words


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
        ("data.val_files", False),
        ("data.truncation=left|error", True),
        ("data.truncation!=left|error", False),
        ("data.seed>0 or data.shuffle=False", True),
        ("data.seed<1 or data.shuffle=False", False),
    ],
)
def test_conditions_by_hand(condition, expected):
    assert is_met(load_config([]).config, "actor_rollout_ref.actor", condition) is expected


VALIDATES = "data.val_files=v.parquet"
ALONE = f"{VALIDATES} trainer.val_only=True"
GAE, KL = "algorithm.adv_estimator=gae", "actor.use_kl_loss=True"
ESTIMATES = "distillation.enabled=True distillation.teacher.model.path=t distillation.distillation_loss.loss_mode="


@pytest.mark.parametrize(
    ("key", "dead", "alive"),
    [
        ("actor.kl_loss_coef=0.1", "", KL),
        ("ref.fsdp_config.param_offload=True", f"{KL} model.lora_rank=8", KL),
        ("ref.fsdp_config.model_dtype=bf16", KL, None),
        ("actor.clip_ratio=0.1", "actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.3", "actor.clip_ratio_low=0.2"),
        ("actor.optim.min_lr_ratio=0.1", "", "actor.optim.lr_scheduler_type=cosine"),
        ("actor.ppo_micro_batch_size_per_gpu=1", "actor.use_dynamic_bsz=True", "actor.use_dynamic_bsz=False"),
        ("ref.log_prob_micro_batch_size_per_gpu=1", f"{KL} actor.use_dynamic_bsz=True", None),
        ("actor.ppo_max_token_len_per_gpu=9999", "actor.ppo_micro_batch_size_per_gpu=1", ""),
        (
            "actor.ppo_max_token_len_per_gpu=4096",
            "actor.use_dynamic_bsz=False actor.ppo_micro_batch_size_per_gpu=2",
            "actor.use_dynamic_bsz=True",
        ),
        ("rollout.val_kwargs.temperature=0.6", "rollout.val_kwargs.do_sample=False", "rollout.val_kwargs.n=4"),
        ("rollout.tail_max_age=2", "rollout.tail=oversample rollout.oversample_ratio=1", "rollout.tail=oversample"),
        ("+rollout.engine_kwargs.vllm.block_size=32", "rollout.name=sglang", "rollout.name=vllm"),
        ("rollout.free_cache_engine=False", "", "rollout.name=vllm"),
        ("rollout.multi_turn.max_assistant_turns=3", "", "rollout.multi_turn.function_tool_path=tools.py"),
        ("model.use_remove_padding=False", "", "model.use_remove_padding=True"),
        ("model.lora_rank=8", "model.lora_adapter_path=a", ""),
        ("critic.optim.lr=1e-5", f"{ALONE} {GAE}", GAE),
        ("critic.model.lora_alpha=8", GAE, f"{GAE} critic.model.lora_rank=4"),
        ("algorithm.gamma=0.9", "", GAE),
        ("trainer.resume_from_path=c/global_step_5", "", "trainer.resume_mode=resume_path"),
        ("trainer.test_freq=5", ALONE, VALIDATES),
        ("trainer.hang_factor=9", "trainer.hang_floor_s=null", ""),
        (
            "actor.checkpoint.save_contents=[model]",
            "",
            "actor.checkpoint.save_contents=[model,optimizer,extra]",
        ),
        # Settings for estimates have no effect if whole distributions are compared.
        ("distillation.teacher.log_prob_max_token_len_per_gpu=8192", f"{ESTIMATES}jsd", f"{ESTIMATES}k3"),
    ],
)
def test_a_key_without_effect_is_named_and_others_are_not(key, dead, alive):
    name = words(key)[0].partition("=")[0].lstrip("+")
    assert [note for note in notes(key, dead) if name in note.partition(": no effect: ")[0] != note]
    if alive is not None:
        assert not [note for note in notes(key, alive) if name in note.partition(": no effect: ")[0]]


def test_every_number_whose_condition_is_not_met_is_named():
    config = load_config(BASE).config
    other = [f"{name}={get(config, name) * 0.9 + 0.05}" for name in all_keys() if type(get(config, name)) is float]
    loaded = load_config([*BASE, *other])
    told = " ".join(line.partition(": no effect: ")[0] for line in without_effect(loaded))
    dead = {
        name for name in loaded.explicit
        if not all(is_met(loaded.config, scope, condition) for scope, condition, _ in all_keys()[name].only_with)
    }  # fmt: skip
    assert len(dead) > 30
    assert {name for name in dead if name not in told} == set()


def test_weights_of_0_need_no_note():
    off = [f"{A}actor.kl_loss_coef=0.0", "algorithm.kl_ctrl.kl_coef=0", "trainer.critic_warmup=0"]
    assert notes(*off) == []
    assert len(notes(*[key.replace("=0", "=1") for key in off])) == 3


def test_keys_without_effect_for_one_reason_share_a_line():
    overlong = "reward.reward_kwargs.overlong_buffer_cfg."
    renamed = [f"{A}actor.grad_clip=1.0", f"{overlong}len=8", f"{overlong}penalty_factor=2"]
    of_ref = [f"{A}ref.log_prob_use_dynamic_bsz=True", f"{A}ref.fsdp_config.param_offload=True"]
    assert notes(*renamed, *of_ref) == [
        f"{A}actor.grad_clip is called {A}actor.optim.clip_grad here",
        f"{A}ref.fsdp_config.param_offload, {A}ref.log_prob_use_dynamic_bsz: no effect: there is no reference policy "
        "with use_kl_loss=False",
        f"{overlong}len, {overlong}penalty_factor: no effect: reward_model.reward_manager=naive; it has an effect with "
        "reward_manager=dapo",
    ]
