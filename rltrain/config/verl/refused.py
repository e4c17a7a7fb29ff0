"""verl's keys and sections that are refused, each with one sentence: what is so here, and what to type instead.

What would make a run another experiment is refused, not noted. How a row is written: `config.schema.conditions`.
"""

from __future__ import annotations

from rltrain.config.schema.engines import FULL_PRECISION

_A = "actor_rollout_ref."
_R = _A + "rollout."
_FSDP = "the training backend here is FSDP2: "
_LEAVE = _FSDP + "leave it out"
_SYNCHRONOUS = (
    "training is synchronous here, on devices that all roles share: leave it out; "
    "actor_rollout_ref.rollout.tail=carry_over (or oversample) keeps a step from waiting for its longest answers"
)
_LOOPS = (
    "loops of verl's classes are not in this version: who answers the policy is a class with step or with tools, "
    "multi_turn.environment=FILE.py:NAME, or a function that leads it, agent.default_agent_loop=FILE.py:NAME"
)
_SHOWN = "prompts show the tools that may be called, and no others: use actor_rollout_ref.rollout.multi_turn.{}"
_MANAGER = (
    "a reward manager of one's own reads verl's batch of tensors, which no process has here: write what it computes "
    "for an answer as a function (custom_reward_function.path and name), or for many with "
    "reward_model.reward_manager=batch"
)
_TEACHER_LOSS = "distillation.distillation_loss."
_ONE_TEACHER = "one teacher judges all prompts: name it with distillation.teacher.model.path"
_LR_NAMES = "this is Megatron's name: use optim.lr_scheduler_type, lr_warmup_steps and min_lr_ratio"
# Of rows of NO_EFFECT beside other settings. A reward model's server with a function of the user's own: in verl that
# function asks the server.
GENERATIVE = (
    "a generative reward model has no address here that custom_reward_function.path could ask: set "
    "reward_model.model.type=generative, with the message in reward.judge.prompt and what reads the reply in "
    "reward.judge.parse; or serve it yourself, let your function ask its address, and leave reward_model.enable out"
)

# Keys whose null is no default -> why, and the way out.
NO_NULL = {
    "algorithm.adv_estimator": "no estimator is named (the trainers SPPO and SPIN of verl's recipes have none, and are "
    "not in this version): give one, such as gae or grpo"
}

# Keys that are refused -> why, and the way out.
REFUSED = {
    _A + "hybrid_engine=False": _SYNCHRONOUS,
    "rollout.nnodes": _SYNCHRONOUS,
    "rollout.n_gpus_per_node": _SYNCHRONOUS,
    "rollout.test_freq": _SYNCHRONOUS,
    "rollout.total_*": _SYNCHRONOUS,
    "model_engine!=dp|fsdp|fsdp2": _LEAVE,
    "*.actor.model_engine!=dp|fsdp|fsdp2": _LEAVE,
    "*.optim.lr_scheduler.*": "the schedule is {optim}.lr_scheduler_type, lr_warmup_steps and min_lr_ratio: use these",
    "trainer.scheduler": _SYNCHRONOUS,
    "trainer.checkpoint_callback_class": "verl's classes read its own checkpoints: name a class with on_save in "
    "trainer.callbacks=FILE.py:NAME",
    _R + "router_config_path": "requests are not routed, since all engines take prompts from one queue: leave it out",
    _R + "agent.agent_loop_config_path": _LOOPS,
    _R + "agent.agent_loop_manager_class": _LOOPS,
    _R + "agent.custom_async_server.*": "the engines are those of --help actor_rollout_ref.rollout.name",
    _R
    + "multi_turn.interaction_config_path": "verl's own later versions have no interactions: who answers the policy is "
    "a class with step, multi_turn.environment=FILE.py:NAME",
    _R + "multi_turn.completion_callback": _LOOPS,
    _R
    + "multi_turn.max_user_turns!=${"
    + _R
    + "multi_turn.max_assistant_turns}": "an answer that is answered so often "
    "has at most one turn more: use multi_turn.max_assistant_turns",
    _R + "chat_scheduler": _LOOPS,
    _R + "use_fire_sampling": "FIRE sampling is not in this version: leave it out",
    _R + "nnodes": _SYNCHRONOUS,
    _R + "data_parallel_size!=1": "the number of engines is that of the devices divided by tensor_model_parallel_size: "
    "leave it out",
    _R + "pipeline_model_parallel_size!=1": "an engine spans devices by tensor_model_parallel_size alone: use that",
    _R + "quantization*": FULL_PRECISION + ": leave it out",
    _R + "skip_rollout": "every step generates its own answers: leave it out",
    "*.strategy!=fsdp2|fsdp": _LEAVE,
    "*.model.enable_gradient_checkpointing>1": "every layer is recomputed or none is: use True, or False where memory "
    "has room for their activations",
    "*.optim.optimizer!=AdamW|adamw|adam": "every model is trained by AdamW: leave it out",
    "*.override_optimizer_config.amsgrad": "every model is trained by AdamW without amsgrad: leave it out",
    "*.override_optimizer_config.maximize": "a loss is always minimised: leave it out",
    "*.optim.lr_decay_*": _LR_NAMES,
    "*.optim.lr_wsd_*": _LR_NAMES,
    "*.optim.lr_warmup_init": _LR_NAMES,
    "*.optim.min_lr": _LR_NAMES,
    "*.model.modules_to_save": "adapters alone are trained beside lora_rank, no module in full: leave it out",
    # Skywork-OR1's.
    _A + "actor.adaptive_entropy.enabled=False": "adaptive_entropy.target_entropy turns it on: leave both out",
    _A + "actor.adaptive_entropy.min_ent_coef!=0|0.0": "the weight of the bonus may fall to 0: leave it out",
    "*.model.lora.rank": "this is Megatron's name: use model.lora_rank, lora_alpha and target_modules",
    _A + "model.tokenizer_path!=${actor_rollout_ref.model.path}": "save the tokenizer in the folder of model.path",
    _A + "model.hf_config_path!=${actor_rollout_ref.model.path}": "save config.json in the folder of model.path",
    "critic.model.lora_adapter_path": "the critic's adapters start anew: use critic.model.lora_rank",
    "algorithm.use_pf_ppo": "PF-PPO is not in this version: leave it out",
    "data.min_response_length": "an answer ends where the model ends it: leave it out",
    "data.tokenizer!=${actor_rollout_ref.model.path}": "save the tokenizer in the folder of model.path",
    "data.mm_processor_kwargs*": "images are made by the processor of model.path as it is saved there: use "
    "data.min_pixels and data.max_pixels, or change preprocessor_config.json in that folder",
    **{
        f"data.{name}!=${{{_R}multi_turn.{name}}}": _SHOWN.format(name)
        for name in ("tool_config_path", "function_tool_path")
    },
    _TEACHER_LOSS + "policy_loss_mode!=vanilla": "the cost of a token goes through PPO's loss (vanilla): leave it out",
    _TEACHER_LOSS + "kd_temperature!=1": "both distributions are those of actor_rollout_ref.rollout.temperature: leave "
    "it out",
    **{
        f"{_TEACHER_LOSS}{name}!=0.2|${{{_A}actor.{name}}}": f"the clip is the actor's: use {_A}actor.{name}"
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
    },
    **{f"distillation.{name}.*": _ONE_TEACHER for name in ("privileged_context", "teacher_selection")},
    "distillation.teacher_models.*.model_path": _ONE_TEACHER,
    "*reward_manager.source!=register": _MANAGER,
    "reward_model.reward_manager=limited|rate_limited": "use naive: at most reward.num_workers answers are scored at "
    "once, and a limit on requests belongs into your function; of a model as "
    "judge it is reward.judge.rate_limit_per_min",
    "reward_model.reward_loop_source!=register": _MANAGER,
    "reward_model.reward_loop_*": _MANAGER,
    "*sandbox_fusion_url": "use custom_reward_function.path with a function that calls your sandbox",
    "trainer.v1.trainer_mode!=sync": _SYNCHRONOUS,
    "trainer.v1.sampler.custom_sampler.*": "use data.sampler.name=FILE.py:NAME",
    "*@*": "config groups are Hydra's: put settings in a YAML file and give --config FILE",
    # Megatron's keys, where there is something to use in their place.
    "*.megatron.*model_parallel_size!=1": _FSDP + "weights are sharded over all devices by themselves; for long "
    "sequences use {role}.ulysses_sequence_parallel_size",
    "*.megatron.expert_*parallel_size!=1": _FSDP + "use {fsdp}.expert_parallel_size, or leave it out, as weights are "
    "sharded over all devices by themselves",
    "*.megatron.context_parallel_size!=1": _FSDP + "use {role}.ulysses_sequence_parallel_size",
    "*.megatron.param_offload": _FSDP + "use {fsdp}.param_offload",
    "*.ref.megatron.optimizer_offload": _FSDP + "leave it out, the reference has no optimizer",
    "*.megatron.optimizer_offload": _FSDP + "use {fsdp}.optimizer_offload",
    "*.megatron.grad_offload": _FSDP + "leave it out, gradients live only during the update",
    "*.megatron.override_transformer_config.recompute*": _FSDP + "use {model}.enable_gradient_checkpointing=True",
    "*.megatron.dist_checkpointing_path": _FSDP
    + "use trainer.resume_mode=resume_path trainer.resume_from_path=…/global_step_N",
}

# Sections of verl's -> (the key in them that turns them on, "" where any key does; why they are refused, and the way
# out). Where the switch is off, the section says nothing.
SECTIONS = {
    "async_training.*": ("", _SYNCHRONOUS),
    "*.megatron.*": ("", _FSDP + "leave Megatron's keys out, or see --help {fsdp}"),
    "data.datagen.*": ("path", "rows are read once, before the first step: make them in a class of data.custom_cls"),
    "*.veomni.*": ("", _LEAVE),
    _A + "actor.engine.*": ("", _LEAVE),
    "*.torchtitan.*": ("", _LEAVE),
    "*.automodel.*": ("", _LEAVE),
    "*.mindspeed*.*": ("", _LEAVE),
    "*.hyperparallel.*": ("", _LEAVE),
    "*.deepspeed.*": ("", _LEAVE),
    "*.ref.router_replay.*": ("mode", "the reference goes by its own router: leave it out"),
    "*.critic.router_replay.*": ("mode", "a critic goes by its own router: leave it out"),
    "*.qat.*": ("enable", "training in low precision (FP8, QAT) is not in this version: leave it out"),
    "*.mtp.*": ("enable", "multi-token prediction heads are not trained and not used: leave it out"),
    "*.disaggregation.*": ("enabled", "every engine both prefills and decodes: leave it out"),
    "skip.*": ("enable", "every step generates its own answers: leave it out"),
    "hydra.*": ("", "there is no Hydra here: put settings in a YAML file and give --config FILE (repeatable)"),
    "*sandbox_fusion.*": ("url", "use custom_reward_function.path with a function that calls your sandbox"),
}

_RECIPE = (
    "this is a key of {}, a trainer of verl's recipes with a loss or data of its own, which is not in this version: "
    "leave it out for plain PPO or GRPO"
)
_EASYR1 = "this is a key of EasyR1, whose configurations rltrain does not read: see docs/from-easyr1.md"
_NOBODY_S = "no version of verl has this key: leave it out"
# Keys of recipes and forks of verl, looked at last: what they turn on is not here, and a note would hide that.
OTHERS = {
    "worker.*": _EASYR1,
    "config": "a configuration file is given as --config FILE. If it is EasyR1's, see docs/from-easyr1.md",
    _R + "agent.*": _NOBODY_S,
    _R + "multi_turn.*": _NOBODY_S,
    "trainer.ref_update_freq": _RECIPE.format("SPIN (online DPO)")
    + "; a reference that moves is actor_rollout_ref.ref.update_every_steps=N",
    **{
        pattern: _RECIPE.format(recipe)
        for recipe, patterns in {
            "SPPO": ("algorithm.sppo_eta", "*.actor.sppo_eta", "*.extra.sppo_eta"),
            "FlowRL": ("algorithm.tb_coef", "*.actor.tb_coef", "*.flowrl*"),
            "PRIME": (
                *("data.filter_accuracy", "data.accuracy_*_bound", "data.oversample_factor", "reward_model.prime_*"),
                *("algorithm.reward_*_coef", "reward_model.mini_batch_size", "reward_model.model.ref_*"),
                *(f"reward_model.model.{name}" for name in ("update", "optim.*", "beta_train", "loss_type")),
            ),
            "SPIN (online DPO)": ("*.dpo_*",),
            "SPO": ("trainer.spo.*",),
            "representation-based exploration": ("reward_model.*elliptical.*",),
            "GKD (distillation)": (_A + "teacher.*",),
            "DMPO": ("*.dmpo_*",),
            "GVPO": ("*.gvpo_*",),
            "CoDaPO": ("algorithm.codapo_*",),
            "a cache of answers": ("trainer.gen_cache.*",),
        }.items()
        for pattern in patterns
    },
}
# The names of their configuration files, of which not all have a key that tells.
RECIPES = {
    f"{name}_trainer": recipe
    for name, recipe in {
        **{"sppo": "SPPO", "flowrl": "FlowRL", "prime": "PRIME", "spin": "SPIN (online DPO)", "spo": "SPO"},
        **{"on_policy_distill": "GKD (distillation)", "opkd": "GKD (distillation)", "sdpo": "SDPO", "dmpo": "DMPO"},
        **{"rep_exp": "representation-based exploration", "collabllm": "CollabLLM", "disco": "DisCO", "tppo": "T-PPO"},
    }.items()
}
