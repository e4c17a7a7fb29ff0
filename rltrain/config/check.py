"""Validation of a config. All broken rules are reported together, each with key, value and a fix. Rules of one key are
declared at its field (`fields.Rules`), and `_each_key` applies them. The functions here check combinations of values.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rltrain.common.errors import ConfigError
from rltrain.common.plugin import is_plugin, plugin_file
from rltrain.common.storage import converter_hint, matching
from rltrain.config.agents import several_turns
from rltrain.config.budgets import budget_problems, sequence_problems, tensor_problems
from rltrain.config.engine_rules import engine_problems, replay_problems, supervised_problems, tail_problems
from rltrain.config.loaded import LoadedConfig
from rltrain.config.passes import has_critic, has_reference, step_phases
from rltrain.config.schema import Config
from rltrain.config.schema.conditions import as_text, is_met
from rltrain.config.schema.distillation import distillation_problems
from rltrain.config.schema.keys import all_keys, followed, get, plugin_keys
from rltrain.config.schema.model import HALF, NO_MASTER
from rltrain.config.schema.reward import asked_of_scorers, reward_problems, reward_terms
from rltrain.config.schema.trainer import folder_problems, name_problems, profile_problems, word_problems
from rltrain.config.step_passes import roles_of

_A = "actor_rollout_ref."
_R = _A + "rollout."
# Name parts of keys with an upper limit.
_LIMITS = ("clip", "limit", "_s")
# Sections of models that an evaluation does not load.
_TRAINED = (_A + "ref.", "critic.", "distillation.")
# Suffixes of keys that count cooperating devices, with the object that the devices share.
_SPANNING = {
    "ulysses_sequence_parallel_size": "sequences",
    "ring_attention_size": "sequences",
    "tensor_model_parallel_size": "engines",
    "tensor_parallel_size": "matrices",
    "fsdp_size": "copies of the weights",
    "expert_parallel_size": "layers of experts",
}


# Tokenizer arguments that are not arguments of the template, each with the reason why it is refused.
_OF_TOKENIZER = {
    "add_generation_prompt": "it is always true, because the model continues", "tokenize": "rltrain sets it",
    "continue_final_message": "a new turn is always opened", "truncation": "see data.truncation",
    "max_length": "see data.max_prompt_length", "padding": "prompts are packed without padding",
    "chat_template": f"see {_A}model.custom_chat_template", "messages": "the rows define them",
    "conversation": "the rows define them", "return_tensors": "rltrain sets it",
    "return_dict": "rltrain sets it", "return_assistant_tokens_mask": "rltrain sets it",
    "tokenizer_kwargs": "rltrain sets it", "processor_kwargs": "rltrain sets it",
}  # fmt: skip


def check(loaded: LoadedConfig) -> None:
    """Raise ConfigError with all rules that the config breaks."""
    if problems := broken_rules(loaded):
        raise ConfigError("\n".join(problems))


def broken_rules(loaded: LoadedConfig) -> list[str]:
    """Return one line for every rule that the config breaks."""
    # All rules run, so each must tolerate values that another rule refuses.
    config = loaded.config
    trainer, actor, algorithm = config.trainer, config.actor_rollout_ref.actor, config.algorithm
    rules = [
        _each_key(config),
        _lists(config),
        word_problems(trainer),
        uneven(config),
        _lora(config),
        _recomputation(config),
    ]
    rules += [budget_problems(config), reward_problems(config.scoring, config.data.max_response_length)]
    rules += [engine_problems(config), folder_problems(trainer, bool(config.data.val_files))]
    rules += [name_problems(trainer), _run(config)]
    # An evaluation is usually a training command with one more key, so keys that only training needs are allowed.
    if "actor" in roles_of(config):
        rules += [rule(config) for rule in (_mixing, _precision, _comparison, _correction, _entropy)]
        rules += [tensor_problems(config), sequence_problems(config)]
        rules += [reward_terms(config.scoring, algorithm), tail_problems(config), replay_problems(config)]
        rules.append(supervised_problems(config))
        rules.append(asked_of_scorers(config.reward_model, algorithm, config.data.sampler.name))
        exact_kl = actor.use_kl_loss and actor.kl_loss_type == "full"
        rules.append(distillation_problems(config.distillation, exact_kl, algorithm.use_kl_in_reward))
        rules.append(profile_problems(trainer, step_phases()))
    # Name the keys that the user wrote. If several keys follow one key, report it once.
    return list(dict.fromkeys(loaded.as_written(problem) for rule in rules for problem in rule))


def missing_files(config: Config) -> list[str]:
    """Return an error for each local file or folder that the config names and that does not exist."""
    data = config.data
    # A user's dataset class may accept anything as a file.
    files = {} if data.custom_cls else {"data.train_files": data.train_files, "data.val_files": data.val_files}
    named = [(key, path) for key, paths in files.items() for path in as_list(paths)]
    code = [("custom_reward_function.path", path) for path in as_list(config.custom_reward_function.path)]
    code += [(key, name.rpartition(":")[0]) for key in plugin_keys() if is_plugin(name := get(config, key) or "")]
    code += [("trainer.callbacks", name.rpartition(":")[0]) for name in config.trainer.callbacks]
    # Plugins given as modules are not checked here: they are resolved when they are imported.
    named += [(key, file) for key, place in code if (file := plugin_file(place)) is not None]
    # Anything else may be a hub name.
    if (adapter := config.actor_rollout_ref.model.lora_adapter_path or "").startswith(("/", ".", "~")):
        named.append((_A + "model.lora_adapter_path", adapter))
    if config.trainer.resume_mode == "resume_path":
        named.append(("trainer.resume_from_path", str(config.trainer.resume_from_path)))
    return [
        f"{key}: {path} does not exist.{converter_hint(path) or nearest_file(Path(path).expanduser())}"
        for key, path in named
        if not (matching(path) if key in files else Path(path).expanduser().exists())
    ]


def as_list(value: Any) -> list[str]:
    """Return a list key that may be null or a bare string as a list."""
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def nearest_file(path: Path) -> str:
    """Return " Did you mean …?" with a similar name in the folder of a missing path, or ""."""
    if not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def _each_key(config: Config) -> Iterator[str]:
    """Yield errors for names and bounds declared at the fields."""
    for key in all_keys().values():
        value, rules = get(config, key.name), key.rules
        for item in value if isinstance(value, list) else [value]:
            if item is None or item in rules.among or (rules.plugin and is_plugin(item)):
                continue
            if rules.among:
                own = ", or your own function: FILE.py:NAME" if rules.plugin else ""
                yield f"{key.name}={as_text(value)}: '{item}' is not known; use one of {', '.join(rules.among)}{own}."
            elif rules.plugin:
                yield f"{key.name}={item}: give the file and the name in it, FILE.py:NAME."
        # 0 is accepted for unused keys, because scripts write it, for example lora_alpha=0 without adapters.
        section = key.name.rpartition(".")[0]
        unused = not value and not all(is_met(config, section, condition) for condition in rules.only_with)
        if isinstance(value, int | float) and not rules.within(value) and not unused:
            source = key
            while other := followed(source.name):
                source = all_keys()[other]
            usual = f" Try {source.default:g}." if isinstance(source.default, int | float) else ""
            if value == math.inf and any(word in key.name for word in _LIMITS):
                usual += " For no limit, use a large number such as 1e9."
            wanted = [*(["a finite number"] if not math.isfinite(value) else []), *filter(None, [rules.bounds()])]
            yield f"{key.name}={value}: it must be {', '.join(wanted)}.{usual}"


def _lists(config: Config) -> Iterator[str]:
    """Yield errors for items of lists, dictionaries and ranges."""
    for name in config.trainer.callbacks:
        if ":" not in name:
            callbacks = f"trainer.callbacks={config.trainer.callbacks}"
            yield f"{callbacks}: '{name}' is not the name of a class or function. Give FILE.py:NAME."
    for low, high in (("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels")):
        least, most = getattr(config.data, low), getattr(config.data, high)
        if least and most and least > most:
            yield f"data.{low}={least} is more than data.{high}={most}. Lower it, or raise the other."
    for name, value in config.data.apply_chat_template_kwargs.items():
        if name in _OF_TOKENIZER:
            yield (
                f"data.apply_chat_template_kwargs.{name}={value}: {_OF_TOKENIZER[name]}. Leave it out. This mapping is "
                "for variables of the chat template, such as enable_thinking."
            )
    for section in (_A + "actor.optim", "critic.optim"):
        betas = get(config, f"{section}.betas")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            yield f"{section}.betas={betas}: give two numbers from 0 to below 1, such as [0.9,0.999]."
    if not all(map(math.isfinite, weights := config.algorithm.gdpo_reward_weights or [])):
        yield f"algorithm.gdpo_reward_weights={weights}: give finite numbers."
    for name, weight in config.reward.weights.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
            yield f"reward.weights.{name}={weight}: give a number, such as reward.weights.{name}=0.5."


def _precision(config: Config) -> Iterator[str]:
    """Yield errors for trained weights in half precision, whose small steps would vanish, and for their moments."""
    trained = {_A + "actor": ("fsdp_config", True), "critic": ("model.fsdp_config", has_critic(config))}
    for role, section in ((role, section) for role, (section, is_trained) in trained.items() if is_trained):
        if (dtype := get(config, key := f"{role}.{section}.model_dtype")) in HALF:
            yield f"{key}={dtype}: {NO_MASTER}."
        if (moments := get(config, f"{role}.optim.moments")) != "auto" and dtype not in ("float32", "fp32"):
            yield (
                f"{role}.optim.moments={moments}: moments of weights in {dtype} have the dtype of the weights. Leave "
                f"it out, or set {key}=float32."
            )


def _uneven_batches(config: Config) -> Iterator[str]:
    """Yield errors if mini-batches do not divide a step, or rounds cannot fill it."""
    prompts, filtering = config.data.train_batch_size, config.algorithm.filter_groups
    for section, used in ((_A + "actor", True), ("critic", has_critic(config))):
        key = f"{section}.ppo_mini_batch_size"
        mini = get(config, key)
        if used and min(prompts, mini) > 0 and prompts % mini:
            # The largest divisor that does not exceed the given size.
            fitting = next(size for size in range(min(mini, prompts), 0, -1) if prompts % size == 0)
            yield (
                f"data.train_batch_size={prompts} is not a multiple of {key}={mini}, so some prompts would be left out "
                f"of every step. Try {key}={fitting}."
            )
    rounds, drawn = filtering.most_rounds, config.data.gen_batch_size or prompts
    if filtering.enable and rounds * drawn < prompts:
        yield (
            f"data.gen_batch_size={drawn} in at most {rounds} rounds (algorithm.filter_groups.max_num_gen_batches) "
            f"cannot fill data.train_batch_size={prompts}. Set gen_batch_size to at least {-(-prompts // rounds)}."
        )


def uneven(config: Config) -> Iterator[str]:
    """Yield errors for numbers that do not divide others as required. Nothing is rounded."""
    trains = "actor" in roles_of(config)
    if trains:
        yield from _uneven_batches(config)
    here = config.trainer.n_gpus_per_node
    devices = config.trainer.nnodes * here
    for key in all_keys():
        spanning = [name for ending, name in _SPANNING.items() if key.endswith(ending)]
        if not spanning or (not trains and key.startswith(_TRAINED)):
            continue
        size = get(config, key) or 0
        # The two keys of a section are checked as a product and reported once.
        if key.endswith("ring_attention_size") and size > 1:
            section = key.rpartition(".")[0]
            size = get(config, f"{section}.ranks_per_sequence")
            key = f"{section}.ulysses_sequence_parallel_size x ring_attention_size"
        size = min(size, devices) if key.endswith("fsdp_size") else size  # a larger size means all devices
        if size > 0 and devices % size:
            yield f"{key}={size} does not divide the {devices} devices (trainer.nnodes x trainer.n_gpus_per_node)."
        elif size > 0 and here % size and size % here:
            divisors = ", ".join(str(divisor) for divisor in range(1, here + 1) if here % divisor == 0)
            yield (
                f"{key}={size} does not divide trainer.n_gpus_per_node={here}: some {spanning[0]} would span nodes and "
                f"others would not. Use one of {divisors}, or a multiple of {here}."
            )


def _comparison(config: Config) -> Iterator[str]:
    """Yield errors for estimators and filters that cannot compare responses, because a prompt has only one."""
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    filtering, estimator = algorithm.filter_groups.enable, algorithm.estimator
    levels = [name for name in ("mean_level", "std_level") if getattr(algorithm.adv_norm, name)]
    if levels and (estimator.per_token or estimator.per_turn):
        yield (
            f"algorithm.adv_norm.{levels[0]}={getattr(algorithm.adv_norm, levels[0])} normalises one advantage per "
            f"response, but algorithm.adv_estimator={algorithm.adv_estimator} computes several. Leave it out, or use "
            "algorithm.adv_estimator=grpo."
        )
    if estimator.sum_pi_squared and algorithm.rollout_correction.bypass_mode:
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs the old policy's distribution at every token, "
            "but algorithm.rollout_correction.bypass_mode=True skips the old_log_prob pass. Leave bypass_mode out."
        )
    if not config.learns_from_rewards or not (filtering or estimator.compares):
        return
    needs = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if estimator.per_turn and not several_turns(rollout):
        yield (
            f"{needs} compares turns, but there are no tools and no environment. Set one of them ({_R}multi_turn.…), "
            "or use algorithm.adv_estimator=rloo or grpo."
        )
    if rollout.n < 2 and estimator.compares and not estimator.takes_one:
        yield f"{needs} compares responses to one prompt, so {_R}n must be >= 2 (got {rollout.n}). Try {_R}n=8."
    several = rollout.n > 1
    if filtering and several and algorithm.filter_groups.metric == "seq_final_reward" and algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric=seq_final_reward keeps every group under algorithm.use_kl_in_reward=True, "
            "because no two responses have the same KL. Use algorithm.filter_groups.metric=seq_reward."
        )
    if not rollout.do_sample and several:
        yield f"{_R}do_sample=False makes all responses to a prompt equal, so they have no advantage. Leave it out."


def _entropy(config: Config) -> Iterator[str]:
    """Yield errors for settings that need the entropy of the old_log_prob pass if that pass is skipped."""
    actor = config.actor_rollout_ref.actor
    control, share = actor.adaptive_entropy, actor.top_entropy_quantile
    readers = {
        f"adaptive_entropy.target_entropy={control.target_entropy}": control.enabled,
        f"top_entropy_quantile={share}": share < 1,
    }
    for reader, reads in readers.items():
        if reads and config.algorithm.rollout_correction.bypass_mode:
            yield (
                f"{_A}actor.{reader} needs the entropy from the old_log_prob pass, but "
                "algorithm.rollout_correction.bypass_mode=True skips that pass. Leave bypass_mode out."
            )


def _correction(config: Config) -> Iterator[str]:
    """Yield errors of the parsers of the rollout correction's keys."""
    correction = config.algorithm.rollout_correction
    parsers = {"rollout_is_threshold": correction.importance_bounds, "rollout_rs": correction.rejection_rules}
    for name, parse in parsers.items():
        try:
            parse()
        except ValueError as error:
            key = f"algorithm.rollout_correction.{name}"
            yield f"{key}={getattr(correction, name)}: {error}. See --help algorithm.rollout_correction."


def _lora(config: Config) -> Iterator[str]:
    """Yield errors for the layer names of adapters."""
    for section in (_A + "model", *(["critic.model"] if "actor" in roles_of(config) else [])):
        for key in ("target_modules", "exclude_modules") if get(config, f"{section}.uses_lora") else ():
            value = get(config, f"{section}.{key}")
            names = value if isinstance(value, list) else [value]
            optional = value is None and key == "exclude_modules"
            if not optional and not (names and all(isinstance(name, str) and name for name in names)):
                way_out = "give a name, a list of names such as [q_proj,v_proj], or a pattern of full names"
                yield f"{section}.{key}={value}: {way_out}."
    every = config.actor_rollout_ref.ref.update_every_steps
    if every and config.actor_rollout_ref.model.uses_lora and has_reference(config):
        yield (
            f"{_A}ref.update_every_steps={every}: with LoRA the reference is the policy without its adapters, which "
            "does not change. Leave it out, or train all weights (model.lora_rank=0)."
        )


def _recomputation(config: Config) -> Iterator[str]:
    """Yield errors for an invalid number of recomputed layers (not a switch, word or number)."""
    for section in (_A + "model", "critic.model"):
        value = get(config, key := f"{section}.enable_gradient_checkpointing")
        if not (isinstance(value, bool) or value == "selective" or (isinstance(value, int) and value > 0)):
            yield f"{key}={as_text(value)}: use True, False, selective, or the number of layers to recompute."


def _mixing(config: Config) -> Iterator[str]:
    """Yield errors for the weights of parts of the data."""
    mixing, sampler = config.data.mixing, config.data.sampler.name
    for name, weight in mixing.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight < 0:
            yield f"data.mixing: the weight of '{name}' is {as_text(weight)}; it must be a finite number, at least 0."
            return
    if mixing and not any(mixing.values()):
        yield f"data.mixing={as_text(mixing)}: every weight is 0, so no prompt is left. Set one above 0."
    if mixing and sampler != "shuffle":
        yield f"data.mixing and data.sampler.name={sampler} both choose the prompts of a batch. Keep one of them."


def _run(config: Config) -> Iterator[str]:
    """Yield errors for missing keys that every run needs, and for settings with nothing to do."""
    trainer, steps = config.trainer, config.trainer.total_training_steps
    if not config.actor_rollout_ref.model.path:
        yield f"{_A}model.path is not set. Give a Hugging Face folder or hub name."
    if not trainer.val_only and not as_list(config.data.train_files):
        maker = "python -m rltrain.data_preprocess.jsonl makes them"
        yield f"data.train_files is not set. Give one or more data files ({maker})."
    if trainer.val_only and config.sft.enabled:
        why = "with sft.enabled=True a run validates while it trains"
        yield f"trainer.val_only=True: {why}. Use rltrain evaluate model=RUN."
    if trainer.val_only and not as_list(config.data.val_files):
        yield "trainer.val_only=True needs data.val_files, which is not set."
    if "critic" in roles_of(config) and steps is not None and trainer.critic_warmup > steps:
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup:g} is more than trainer.total_training_steps={steps}, so "
            "the actor would never be updated. Lower it."
        )
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path=…/global_step_N."
