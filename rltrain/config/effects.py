"""Keys the user set that change nothing in the chosen mode, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rltrain.config.check import as_list
from rltrain.config.engines import ENGINES
from rltrain.config.keys import all_keys, free_form_parent, get
from rltrain.config.load import LoadedConfig
from rltrain.config.lora import LORA_MODES
from rltrain.config.passes import passes, sized
from rltrain.config.schema import Config
from rltrain.config.step_passes import needs_all_old_log_probs

_A = "actor_rollout_ref."

# Keys without effect, and the value that says what happens anyway: no note for that one.
_ANYWAY: dict[str, Any] = {
    _A + "hybrid_engine": True,
    _A + "model.use_remove_padding": True,
    _A + "rollout.calculate_log_probs": True,
    _A + "rollout.data_parallel_size": 1,
    _A + "rollout.free_cache_engine": True,
    _A + "rollout.mode": "sync",
    "data.return_raw_chat": True,
    "trainer.balance_batch": True,
}

# Keys (a prefix ends in a dot), the condition under which they change nothing, and why. The first that holds is said.
_MODES: tuple[tuple[tuple[str, ...], Callable[[Config], bool], str], ...] = (
    (
        (_A + "actor.kl_loss_coef", _A + "actor.kl_loss_type"),
        lambda cfg: not cfg.actor_rollout_ref.actor.use_kl_loss,
        "use_kl_loss=False",
    ),
    (
        (_A + "ref.",),
        lambda cfg: not (cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward),
        "there is no reference policy with use_kl_loss=False",
    ),
    (
        tuple(
            f"{_A}ref.fsdp_config.{name}"
            for name in ("model_dtype", "compute_dtype", "fsdp_size", "reshard_after_forward", "optimizer_offload")
        ),
        lambda cfg: True,
        "the reference is sharded and computed like the actor (actor.fsdp_config)",
    ),
    (
        (
            _A + "ref.log_prob_micro_batch_size",
            _A + "ref.log_prob_micro_batch_size_per_gpu",
            _A + "ref.log_prob_max_token_len_per_gpu",
            _A + "ref.log_prob_use_dynamic_bsz",
        ),
        lambda cfg: not cfg.algorithm.use_kl_in_reward and cfg.actor_rollout_ref.actor.kl_loss_type == "full",
        "kl_loss_type=full runs the reference inside the update",
    ),
    *(
        (
            (f"{_A}actor.{key}",),
            lambda cfg, modes=modes: _loss(cfg) not in modes and ":" not in _loss(cfg),
            f"only loss_mode={' or '.join(modes)} uses it",
        )
        for key, modes in {
            "clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl"),
            "tau_pos": ("sapo",),
            "tau_neg": ("sapo",),
            "policy_loss.clip_cov_ratio": ("clip_cov",),
            "policy_loss.clip_cov_lb": ("clip_cov",),
            "policy_loss.clip_cov_ub": ("clip_cov",),
            "policy_loss.kl_cov_ratio": ("kl_cov",),
            "policy_loss.ppo_kl_coef": ("kl_cov",),
        }.items()
    ),
    (
        (_A + "actor.clip_ratio", _A + "actor.clip_ratio_low", _A + "actor.clip_ratio_high"),
        lambda cfg: _loss(cfg) in ("gpg", "sapo", "kl_cov"),
        "this loss_mode clips nothing",
    ),
    (
        (_A + "actor.loss_scale_factor",),
        lambda cfg: (
            cfg.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm"
            and not (cfg.algorithm.needs_critic and cfg.critic.loss_agg_mode == "seq-mean-token-sum-norm")
        ),
        "only loss_agg_mode=seq-mean-token-sum-norm uses it",
    ),
    (
        (_A + "actor.clip_ratio",),
        lambda cfg: (
            None not in (cfg.actor_rollout_ref.actor.clip_ratio_low, cfg.actor_rollout_ref.actor.clip_ratio_high)
        ),
        "clip_ratio_low and clip_ratio_high are both set",
    ),
    (
        (_A + "actor.optim.min_lr_ratio", _A + "actor.optim.num_cycles"),
        lambda cfg: cfg.actor_rollout_ref.actor.optim.lr_scheduler_type == "constant",
        "lr_scheduler_type=constant",
    ),
    (
        (_A + "actor.optim.lr_warmup_steps_ratio",),
        lambda cfg: cfg.actor_rollout_ref.actor.optim.lr_warmup_steps >= 0,
        "lr_warmup_steps is set",
    ),
    *LORA_MODES,
    (
        tuple(f"{_A}rollout.val_kwargs.{name}" for name in ("temperature", "top_k", "top_p")),
        lambda cfg: not cfg.actor_rollout_ref.rollout.val_kwargs.do_sample,
        "validation is greedy; set val_kwargs.do_sample=True",
    ),
    (
        tuple(
            f"{section}.{name}"
            for section in (_A + "actor.fsdp_config", "critic.model.fsdp_config")
            for name in ("param_offload", "optimizer_offload")
        ),
        lambda cfg: cfg.trainer.device == "cpu",
        "on a CPU everything is in host memory",
    ),
    (
        (_A + "actor.fsdp_config.fsdp_size",),
        lambda cfg: (
            cfg.actor_rollout_ref.actor.fsdp_config.fsdp_size >= cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
        ),
        "all devices share one copy of the weights anyway",
    ),
    (
        (_A + "actor.strategy",),
        lambda cfg: cfg.actor_rollout_ref.actor.strategy == "fsdp",
        "fsdp and fsdp2 both mean FSDP2",
    ),
    (
        ("algorithm.gamma",),
        lambda cfg: (
            cfg.algorithm.adv_estimator not in ("gae", "reinforce_plus_plus") and ":" not in cfg.algorithm.adv_estimator
        ),
        "only adv_estimator=gae and reinforce_plus_plus discount",
    ),
    (
        ("algorithm.lam",),
        lambda cfg: cfg.algorithm.adv_estimator != "gae" and ":" not in cfg.algorithm.adv_estimator,
        "only adv_estimator=gae uses it",
    ),
    (
        ("algorithm.norm_adv_by_std_in_grpo",),
        lambda cfg: (
            cfg.algorithm.adv_estimator not in ("grpo", "grpo_passk", "gdpo") and ":" not in cfg.algorithm.adv_estimator
        ),
        "only adv_estimator=grpo, grpo_passk and gdpo use it",
    ),
    (
        ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
        lambda cfg: cfg.algorithm.adv_estimator != "gdpo" and ":" not in cfg.algorithm.adv_estimator,
        "only adv_estimator=gdpo uses it",
    ),
    (
        ("critic.", "trainer.critic_warmup"),
        lambda cfg: not cfg.algorithm.needs_critic,
        "there is no critic without algorithm.adv_estimator=gae",
    ),
    (
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        lambda cfg: cfg.algorithm.kl_ctrl.type == "fixed",
        "kl_ctrl.type=fixed",
    ),
    (
        (
            "algorithm.rollout_correction.rollout_is_threshold",
            "algorithm.rollout_correction.rollout_is_batch_normalize",
        ),
        lambda cfg: cfg.algorithm.rollout_correction.rollout_is is None,
        "rollout_is is null",
    ),
    (
        ("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"),
        lambda cfg: _bypass(cfg) and cfg.algorithm.rollout_correction.loss_type == "ppo_clip",
        "with bypass_mode and loss_type=ppo_clip the ratio itself is taken against the engine",
    ),
    (
        ("algorithm.rollout_correction.rollout_is_batch_normalize",),
        lambda cfg: _bypass(cfg),
        "with bypass_mode weights follow from each micro-batch as it is computed",
    ),
    (
        ("algorithm.rollout_correction.rollout_rs_threshold",),
        lambda cfg: not cfg.algorithm.rollout_correction.rollout_rs,
        "rollout_rs is null",
    ),
    (("algorithm.rollout_correction.loss_type",), lambda cfg: not _bypass(cfg), "bypass_mode=False"),
    (
        (
            _A + "actor.policy_loss.loss_mode",
            _A + "actor.clip_ratio",
            _A + "actor.clip_ratio_low",
            _A + "actor.clip_ratio_high",
            _A + "actor.clip_ratio_c",
        ),
        lambda cfg: _bypass(cfg) and cfg.algorithm.rollout_correction.loss_type == "reinforce",
        "rollout_correction.loss_type=reinforce is a policy loss of its own",
    ),
    (
        (
            _A + "rollout.log_prob_micro_batch_size",
            _A + "rollout.log_prob_micro_batch_size_per_gpu",
            _A + "rollout.log_prob_use_dynamic_bsz",
        ),
        lambda cfg: _bypass(cfg),
        "with bypass_mode no old_log_prob pass is made",
    ),
    (
        (_A + "actor.recompute_old_log_prob",),
        lambda cfg: _bypass(cfg) or needs_all_old_log_probs(cfg),
        "this mode needs the whole pass, or none",
    ),
    (
        ("algorithm.kl_penalty", "algorithm.kl_ctrl."),
        lambda cfg: not cfg.algorithm.use_kl_in_reward,
        "use_kl_in_reward=False",
    ),
    (
        ("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"),
        lambda cfg: not cfg.algorithm.filter_groups.enable,
        "filter_groups.enable=False",
    ),
    (
        ("data.sampler.revisit",),
        lambda cfg: cfg.data.sampler.name != "solve_rate",
        "only data.sampler.name=solve_rate uses it",
    ),
    (("data.gen_batch_size",), lambda cfg: not cfg.algorithm.filter_groups.enable, "filter_groups.enable=False"),
    (
        ("reward_model.overlong_buffer.",),
        lambda cfg: cfg.reward_model.reward_manager != "dapo",
        "only reward_manager=dapo uses it",
    ),
    (
        ("reward_model.overlong_buffer.len", "reward_model.overlong_buffer.penalty_factor"),
        lambda cfg: not cfg.reward_model.overlong_buffer.enable,
        "overlong_buffer.enable=False",
    ),
    (
        tuple(f"reward_model.model.fsdp_config.{name}" for name in ("model_dtype", "optimizer_offload")),
        lambda cfg: True,
        "the reward model is not trained",
    ),
    (
        ("critic.optim.min_lr_ratio", "critic.optim.num_cycles"),
        lambda cfg: cfg.critic.optim.lr_scheduler_type == "constant",
        "lr_scheduler_type=constant",
    ),
    (
        ("critic.optim.lr_warmup_steps_ratio",),
        lambda cfg: cfg.critic.optim.lr_warmup_steps >= 0,
        "lr_warmup_steps is set",
    ),
    (("critic.checkpoint.",), lambda cfg: True, "a checkpoint always holds the whole critic"),
    (
        (
            "custom_reward_function.",
            *(key for key in all_keys() if key.startswith("reward.") and key != "reward.weights"),
        ),
        lambda cfg: cfg.reward_model.enable and cfg.reward_model.rule_weight == 0,
        "reward_model.rule_weight=0: no scorer runs",
    ),
    (("reward.url_concurrency", "reward.url_headers"), lambda cfg: not cfg.reward.url, "reward.url is not set"),
    (
        (
            "reward_model.model.",
            "reward_model.weight",
            "reward_model.rule_weight",
            "reward_model.micro_batch_size_per_gpu",
            "reward_model.use_dynamic_bsz",
            "reward_model.forward_max_token_len_per_gpu",
        ),
        lambda cfg: not cfg.reward_model.enable,
        "reward_model.enable=False",
    ),
    (
        ("trainer.resume_from_path",),
        lambda cfg: cfg.trainer.resume_mode != "resume_path",
        "set trainer.resume_mode=resume_path to use it",
    ),
    (
        ("trainer.log_val_generations", "trainer.validation_data_dir"),
        lambda cfg: not as_list(cfg.data.val_files),
        "data.val_files is not set",
    ),
    (
        ("trainer.test_freq",),
        lambda cfg: cfg.trainer.test_freq > 0 and not as_list(cfg.data.val_files),
        "data.val_files is not set",
    ),
    (
        (_A + "rollout.oversample_ratio", _A + "rollout.tail_max_age"),
        lambda cfg: not cfg.actor_rollout_ref.rollout.stops_early,
        "only tail=oversample and tail=carry_over stop early",
    ),
    (
        (_A + "rollout.tail_max_age",),
        lambda cfg: cfg.actor_rollout_ref.rollout.oversample_ratio == 1,
        "with oversample_ratio=1 no prompt is left over",
    ),
    (
        (_A + "rollout.tail_draft_tokens",),
        lambda cfg: cfg.actor_rollout_ref.rollout.tail != "exact",
        "only tail=exact decodes speculatively",
    ),
)


def _loss(cfg: Config) -> str:
    return cfg.actor_rollout_ref.actor.policy_loss.loss_mode


def _bypass(cfg: Config) -> bool:
    return cfg.algorithm.rollout_correction.bypass_mode


def without_effect(loaded: LoadedConfig) -> list[str]:
    """One line for each key the user set that changes nothing in the chosen mode."""
    notes: dict[str, str] = {}
    for source in (_by_mode, _by_help, _micro_batches, _other_engine):
        for key, why in source(loaded):
            notes.setdefault(key, f"{key}: no effect: {why}")
    return [*notes.values(), *_greedy_validation(loaded.config), *_whole_checkpoints(loaded)]


def _by_mode(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    for names, holds, why in _MODES:
        for key in _set_by_user(loaded, names) if holds(loaded.config) else ():
            yield key, why


def _set_by_user(loaded: LoadedConfig, names: tuple[str, ...]) -> list[str]:
    """The explicit keys among ``names``, in their sections ("a.b."), or in their free-form dictionaries."""
    return [
        key
        for key in sorted(loaded.explicit)
        if key in names
        or free_form_parent(key) in names
        or any(name.endswith(".") and key.startswith(name) for name in names)
    ]


def _by_help(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Keys whose help text says that they have no effect, or none with the chosen engine."""
    name = loaded.config.actor_rollout_ref.rollout.name
    unused = [f"{_A}rollout.{key}" for key in ENGINES[name].unused_keys]
    for key in sorted(loaded.explicit):
        known = all_keys()[free_form_parent(key) or key]
        if known.name in unused:
            yield key, f"the engine is rollout.name={name}"
        elif known.help.startswith("No effect") and not _says_nothing(loaded.config, known.name):
            text = known.help.removeprefix("No effect").lstrip(": ").rstrip(".")
            yield key, text or "it is not in this version"


def _other_engine(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Arguments of an engine that is not the chosen one."""
    name = loaded.config.actor_rollout_ref.rollout.name
    if "engine_kwargs" in ENGINES[name].unused_keys:
        return
    every = "actor_rollout_ref.rollout.engine_kwargs."
    for key in sorted(loaded.explicit):
        if key.startswith(every) and not key.startswith(f"{every}{name}."):
            yield key, f"the engine is rollout.name={name}, whose arguments are {every}{name}"


def _says_nothing(config: Config, key: str) -> bool:
    value = get(config, key)
    return value == _ANYWAY[key] if key in _ANYWAY else value in (None, False)


def _micro_batches(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    every = passes(loaded.config)
    counted = {sized(every, each).size_key for each in every.values() if not each.dynamic}
    for each in every.values():
        by_samples = () if each.size_key in counted else (each.total_key, each.size_key)
        for key in _set_by_user(loaded, by_samples if each.dynamic else (each.tokens_key,)):
            unit, instead = ("tokens", each.tokens_key) if each.dynamic else ("samples", each.size_key)
            yield key, f"{each.switch}={each.dynamic} cuts by {unit} ({instead})"


def _greedy_validation(config: Config) -> Iterator[str]:
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.n > 1 and (not val.do_sample or val.temperature == 0):
        yield (
            f"{_A}rollout.val_kwargs.n={val.n}: no effect: validation is greedy, so one answer says all; "
            "set do_sample=True and a temperature"
        )


def _whole_checkpoints(loaded: LoadedConfig) -> Iterator[str]:
    key = _A + "actor.checkpoint.save_contents"
    left_out = {"model", "optimizer", "extra"} - set(loaded.config.actor_rollout_ref.actor.checkpoint.save_contents)
    if key in loaded.explicit and left_out:
        yield f"{key}: no effect: {', '.join(sorted(left_out))} left out, but always saved, so that every checkpoint can be resumed"
