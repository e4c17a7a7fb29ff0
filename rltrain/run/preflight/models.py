"""Checks of the models of a run before anything is loaded: files, structure, sizes, and whether they can be trained.

Every role builds its model on the meta device as a worker does (`empty_packed`), so errors show within a second and
without weights. A small copy of the model shows whether its outputs are right (`run.preflight.model_check`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rltrain.common.device import get_device
from rltrain.common.errors import ConfigError, DataError
from rltrain.common.plugin import load_plugin
from rltrain.common.versions import installed_version
from rltrain.config.agents import AGENT_KEY, LOOPS_KEY, several_turns, who_answers
from rltrain.config.budgets import judge_lengths
from rltrain.config.engine_rules import position_problems
from rltrain.config.passes import ROLES, Role
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES, engines_with
from rltrain.config.schema.families import family
from rltrain.config.step_passes import make_step_passes
from rltrain.data.chat import ChatEncoder, chat_encoder
from rltrain.data.turns.detect import format_of
from rltrain.data.turns.turn_delta import TurnDelta
from rltrain.models.attention.ulysses import heads_problem
from rltrain.models.experts import parts_with_experts
from rltrain.models.files.source import model_problem
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.load import read_score_head
from rltrain.models.routing import correction_biases
from rltrain.models.weights.lora import exclusion_note
from rltrain.models.weights.shard import check_weight_files, empty_packed
from rltrain.models.weights.spec import ModelSpec, specs_of
from rltrain.run.preflight.model_check import check_numbers, check_routing
from rltrain.run.preflight.sharing import adapter_problems, adapters_of_engine, sharing_problems
from rltrain.trainer.plan import ImageSizes
from rltrain.workers.judge import judge_encoder
from rltrain.workers.reward_model import check_reward_model
from rltrain.workers.rollout.vllm.weights import refuse_on_npu

_R = "actor_rollout_ref.rollout."
_SHOWN = f"{_R}multi_turn.images"
_HELLO = [{"role": "user", "content": "?"}]


@dataclass
class PreflightResult:
    """Results of the checks before a run starts."""

    problems: list[str] = field(default_factory=list)
    """Reasons why the run does not start."""
    notes: list[str] = field(default_factory=list)
    """Warnings; the run starts anyway."""
    tokenizer_works: bool = False
    models_found: bool = True
    """True if every role's folder or name on the hub exists."""
    num_parameters: int = 0
    num_trained: int = 0
    images: ImageSizes | None = None
    """Sizes of the images, known once rows are read."""


def check_models(cfg: Config, result: PreflightResult) -> None:
    """Check folders, structure and adapters of all roles, and positions, heads and template of the policy."""
    models = _models(cfg)
    wrong: dict[str, str] = {}
    for _, spec in models.values():
        problem = model_problem(f"{spec.section}.path", spec.path)
        # A critic without a path starts from the policy, and the policy's key is reported first.
        if problem and wrong.setdefault(spec.path, problem) is problem:
            result.problems.append(problem)
    result.models_found = not wrong
    for role, (kind, spec) in models.items():
        try:
            if spec.path not in wrong:
                _check_model(role, kind, spec, cfg, result)
        except (ConfigError, DataError) as error:
            result.problems.append(str(error))
    result.problems += problems_of_experts(cfg, [path for path in wrong if Path(path, "config.json").is_file()])


def problems_of_experts(cfg: Config, paths: Collection[str] | None = None) -> Iterator[str]:
    """Yield problems of experts and matrices that this many ranks cannot share, in the models of ``paths`` (None: all).
    Needs no weights."""
    for role, (kind, spec) in _models(cfg).items():
        shares = spec.fsdp.expert_parallel_size > 1 or spec.tensor_size > 1
        if shares and (paths is None or spec.path in paths):
            yield from sharing_problems(
                cfg, role, spec, empty_packed(kind, spec, config := spec.load_config()).model, config
            )


def _models(cfg: Config) -> dict[Role, tuple[type[Any], ModelSpec]]:
    """Return the models of the run, without copies of the policy."""
    models = specs_of(cfg, get_device(cfg.trainer.device))
    return {role: model for role, model in models.items() if not model[1].is_copy}


def check_images(cfg: Config, result: PreflightResult) -> None:
    """Check the settings against ``result.images`` and against images that tools may return."""
    passes = make_step_passes(cfg, result.images is not None, bool(result.images and result.images.most_images))
    if passes.images:
        result.problems += _image_problems(cfg, result.images)
        if passes.images_between_turns and (problem := _problem_between_turns(cfg)):
            # It is only a note unless the user enabled images of tools, because there may be none.
            asked = cfg.actor_rollout_ref.rollout.multi_turn.images
            (result.problems if asked else result.notes).append(problem)
        if cfg.distillation.enabled and passes.images_in_training:
            result.problems.append(
                "distillation.enabled=True: prompts have images, but a teacher reads text only. "
                "Remove distillation, or train on text."
            )
        if cfg.reward_model.enable:
            result.notes.append("the reward model reads text only; it gets <image> instead of an image")
    elif cfg.actor_rollout_ref.actor.freeze_vision_tower:
        key = "actor_rollout_ref.actor.freeze_vision_tower"
        result.notes.append(f"{key}: no effect: no prompt has images, so the vision tower is not trained anyway")


def _image_problems(cfg: Config, sizes: ImageSizes | None) -> Iterator[str]:
    """Yield problems of an engine or model that does not accept the policy's images. sizes: of prompts with images."""
    why = "prompts have images" if sizes else f"{_SHOWN}=True"
    rollout, models = cfg.actor_rollout_ref.rollout, _models(cfg)
    engine = rollout.name
    kind, compared = models["actor"][1].load_config().model_type, ENGINES[engine].images
    if compared is not None and kind not in compared:
        others = " or ".join(f"{_R}name={name}" for name, row in ENGINES.items() if row.images is None)
        yield (
            f"{_R}name={engine}: {why}, and images of a {kind} were not compared with transformers on this engine "
            f"(compared: {', '.join(compared) or 'none'}). Use {others}."
        )
    elif sizes and sizes.videos and not ENGINES[engine].videos:
        yield f"{_R}name={engine}: prompts have videos, which this engine does not take. Use {engines_with('videos')}."
    elif (
        sizes and sizes.videos and engine == "vllm" and not family(kind).video_times
        and sizes.most_tokens > rollout.max_num_batched_tokens
    ):  # fmt: skip
        yield (
            f"{_R}max_num_batched_tokens={rollout.max_num_batched_tokens}: vLLM encodes a video at once, and a prompt "
            f"has {sizes.most_tokens} tokens of images and videos. Set it to {sizes.most_tokens} or more."
        )
    for other in (spec for role, (_, spec) in models.items() if not ROLES[role].reads_texts):
        kinds = [spec.load_config().model_type for spec in (models["actor"][1], other)]
        if kinds[0] != kinds[1]:
            yield (
                f"{other.section}.path={other.path} is a {kinds[1]}, but {why}, which are processed for the "
                f"policy's family, {kinds[0]}. Use a model of that family{_or_none(other)}."
            )


def _problem_between_turns(cfg: Config) -> str:
    """Return the reason why images are not possible after a turn; "" if they are."""
    encoder, turns = chat_encoder(cfg), cfg.actor_rollout_ref.rollout.multi_turn
    try:
        encoder.check_images_supported()
        delta = TurnDelta(encoder, encoder.tools, format_of(turns.format, encoder))
        problem = delta.problem(_roles_that_answer(cfg, encoder), images=True)
    except (ConfigError, DataError) as error:
        problem = str(error)
    return problem and (
        f"{_SHOWN}: images of tools and environments cannot be shown to the model: {problem} With {_SHOWN}=False each "
        "of them is an error text; another template is given by actor_rollout_ref.model.custom_chat_template."
    )


def _check_model(role: Role, kind: type[Any], spec: ModelSpec, cfg: Config, result: PreflightResult) -> None:
    config, is_policy, row = spec.load_config(), role == "actor", ROLES[role]
    sizes = {spec.ulysses_key: spec.ulysses_and_ring}
    if is_policy:
        _policy(cfg, spec, config, result)
        sizes |= _sizes_of_policy(cfg)
    elif role == "judge":
        _judge(cfg, config, result)
    elif not row.reads_texts:
        result.problems += _vocabulary(spec, config, chat_encoder(cfg))
        if kind is PolicyModel:
            result.problems += _other_tokens(cfg, spec, config, result)
    result.problems += filter(None, (heads_problem(config, size, key, ring) for key, (size, ring) in sizes.items()))
    # Checked only in local folders, because the head of a hub model is in files of gigabytes.
    if kind is ScalarModel and Path(spec.path).is_dir():
        if row.reads_texts:
            check_reward_model(spec).try_template([[*_HELLO, {"role": "assistant", "content": "!"}]])
        read_score_head(spec.path)
    packed = empty_packed(kind, spec, config)
    if is_policy:
        result.problems += _bias(cfg, spec, packed.model, config)
    result.problems += sharing_problems(cfg, role, spec, packed.model, config)
    result.notes += [note for note in check_weight_files(kind, spec, config) if note not in result.notes]
    trained = sum(weight.numel() for weight in packed.model.parameters() if weight.requires_grad)
    if role == "ref" and cfg.actor_rollout_ref.ref.update_every_steps:
        result.problems += _cannot_become(cfg, spec, packed)
    if is_policy:
        total = sum(weight.numel() for weight in packed.model.parameters())
        result.num_parameters, result.num_trained = total - (trained if spec.lora else 0), trained
    decodes = role == "judge" or (is_policy and ENGINES[cfg.actor_rollout_ref.rollout.name].embedded)
    _unchecked(cfg, check_numbers(kind, spec, config, decodes=decodes), result)
    if spec.lora:
        result.problems += adapter_problems(spec, packed.model, f"{row.fsdp}.use_torch_compile")
        result.notes += [note for note in [exclusion_note(packed.model, spec.lora)] if note]
        if is_policy:
            device = get_device(cfg.trainer.device)
            result.notes += adapters_of_engine(cfg.actor_rollout_ref, device, packed.model, config)


def _unchecked(cfg: Config, untried: str | None, result: PreflightResult) -> None:
    if untried and cfg.trainer.allow_unchecked_models:
        result.notes.append(untried)
    elif untried:
        result.problems.append(
            f"{untried}. Use a supported family (docs/models.md), or set "
            "trainer.allow_unchecked_models=True and compare its log-probs yourself."
        )


def _bias(cfg: Config, spec: ModelSpec, model: Any, config: Any) -> Iterator[str]:
    """Yield a problem if the model's routers have no correction bias that can be updated."""
    actor = cfg.actor_rollout_ref.actor
    key = f"actor_rollout_ref.actor.router_bias_update_rate={actor.router_bias_update_rate:g}"
    if not actor.router_bias_update_rate:
        return
    check_routing(key, spec, config)
    biases, name = correction_biases(model), type(config).__name__.removesuffix("Config")
    if len(biases) != len(parts_with_experts(model)):
        yield (
            f"{key}: the routers of {name} have no correction bias that is a buffer (e_score_correction_bias of "
            "DeepSeek-V3, GLM-4-MoE and similar). Remove it, or use the load-balancing loss: "
            "actor_rollout_ref.actor.router_aux_loss_coef=0.001."
        )
    elif any(bias.dtype != torch.float32 for bias in biases.values()):
        yield (
            f"{key}: actor_rollout_ref.actor.fsdp_config.model_dtype={actor.fsdp_config.model_dtype} would round the "
            "steps of the bias away. Set fsdp_config.model_dtype=float32."
        )


def _policy(cfg: Config, spec: ModelSpec, config: Any, result: PreflightResult) -> None:
    """Check the policy's template, positions, engine weights and router replay."""
    _chat(cfg, config, result)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    result.problems += position_problems(cfg, limit, result.notes)
    rollout = cfg.actor_rollout_ref.rollout
    if ENGINES[rollout.name].rigid_on_npu and get_device(cfg.trainer.device).kind == "npu":
        refuse_on_npu(config, rollout.free_cache_engine, installed_version("vllm-ascend"))
    actor = cfg.actor_rollout_ref.actor
    if (mode := actor.router_replay.mode) != "disabled":
        check_routing(f"actor_rollout_ref.actor.router_replay.mode={mode}", spec, config)
    if coef := actor.router_aux_loss_coef:
        check_routing(f"actor_rollout_ref.actor.router_aux_loss_coef={coef:g}", spec, config)


def _cannot_become(cfg: Config, spec: ModelSpec, packed: Any) -> Iterator[str]:
    """Yield a problem if a moving reference has other weight sizes than the policy."""
    kind, actor = specs_of(cfg, get_device(cfg.trainer.device))["actor"]
    sizes = [
        {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        for model in (empty_packed(kind, actor, actor.load_config()), packed)
    ]
    if sizes[0] != sizes[1]:
        every = f"actor_rollout_ref.ref.update_every_steps={cfg.actor_rollout_ref.ref.update_every_steps}"
        yield (
            f"{every}: {spec.section}.path={spec.path} has weights of other sizes than the policy, so it cannot be "
            "updated from the policy. Remove it, or use a reference of the policy's sizes."
        )


def _chat(cfg: Config, config: Any, result: PreflightResult) -> None:
    encoder, path = chat_encoder(cfg), cfg.actor_rollout_ref.model.path
    encoder.try_template([_HELLO])
    _check_turns(cfg, encoder, result)
    # The dry run checks this before it reads and tokenises rows.
    result.tokenizer_works = bool(encoder.tokenizer)  # raises if there is none
    size, padding = config.get_text_config().vocab_size, getattr(config.get_text_config(), "pad_token_id", None)
    # In prompts, tokens beyond the vocabulary are an error (`check_vocabulary`). Elsewhere they are only noted.
    if size < encoder.vocab_size:
        result.notes.append(f"{path}: its tokenizer has {encoder.vocab_size:,} tokens, but its model has {size:,}")
    if padding is not None and not 0 <= padding < size:
        raise DataError(
            f"actor_rollout_ref.model.path={path}: its config.json has pad_token_id={padding}, but the model has "
            f"{size:,} tokens. Use the config.json and tokenizer that belong to its weights."
        )
    if encoder.ignores_generation_prompt:
        result.notes.append(
            f"the chat template of {path} writes the same with and without add_generation_prompt, so the model "
            "does not see that its turn begins. If rewards stay low, see actor_rollout_ref.model.custom_chat_template."
        )


def _judge(cfg: Config, config: Any, result: PreflightResult) -> None:
    """Check the chat template and the positions of a judge on the devices."""
    judge_encoder(cfg.reward_model.model).try_template([_HELLO])
    limit, longest = getattr(config.get_text_config(), "max_position_embeddings", None), sum(judge_lengths(cfg))
    if limit and longest > limit:
        result.notes.append(
            f"reward_model.rollout.prompt_length + response_length = {longest:,} tokens, but the judge has {limit:,} "
            "positions, so it was not trained on longer ones"
        )


def _check_turns(cfg: Config, encoder: ChatEncoder, result: PreflightResult) -> None:
    """Check that the chat template can continue after a turn, token by token."""
    rollout = cfg.actor_rollout_ref.rollout
    if not several_turns(rollout):
        return
    roles = _roles_that_answer(cfg, encoder)
    delta = TurnDelta(encoder, encoder.tools, format_of(rollout.multi_turn.format, encoder))
    if problem := delta.problem(roles):
        result.problems.append(
            f"{who_answers(rollout)}: the chat template of {encoder.path} cannot be continued after a turn: {problem} "
            "Set actor_rollout_ref.model.custom_chat_template to a template that can be continued."
        )
    for agent in rollout.agent.own:
        load_plugin(AGENT_KEY if agent == rollout.agent.default_agent_loop else LOOPS_KEY, agent)
    result.notes += [f"{encoder.path}: {note}" for note in delta.notes]


def _roles_that_answer(cfg: Config, encoder: ChatEncoder) -> tuple[str, ...]:
    """Return the roles of messages that may occur between two turns."""
    rollout = cfg.actor_rollout_ref.rollout
    users_speak = encoder.row_tools.has_step or not rollout.multi_turn.place or rollout.agent.own
    return (("tool",) if encoder.tools else ()) + (("user",) if users_speak else ())


def _vocabulary(spec: ModelSpec, config: Any, encoder: ChatEncoder) -> Iterator[str]:
    """Yield a problem if the model lacks tokens that the policy may generate."""
    size, written = config.get_text_config().vocab_size, encoder.vocab_size
    if size < (written := min(written, encoder.model_vocab_size or written)):
        yield (
            f"{spec.section}.path={spec.path} has {size:,} tokens, but the policy can generate {written:,}. Use a "
            f"model with the policy's tokenizer{_or_none(spec)}."
        )


def _or_none(spec: ModelSpec) -> str:
    """Return the alternative to an unsuitable model: without the key, critic and reference are the policy."""
    is_needed = spec.section.startswith(("distillation.", "reward"))
    return "" if is_needed else ", or leave the key out to start from the policy"


def _other_tokens(cfg: Config, spec: ModelSpec, config: Any, result: PreflightResult) -> Iterator[str]:
    """Yield problems of a model whose tokens differ from the policy's, so that its log-probs are meaningless."""
    named, encoder, passes = f"{spec.section}.path={spec.path}", chat_encoder(cfg), make_step_passes(cfg)
    try:
        # The template is unused, and a base model may have none.
        reference = ChatEncoder(spec.path, trust_remote_code=spec.trust_remote_code, chat_template="{{ messages }}")
        tokens = {index: token for token, index in reference.tokenizer.get_vocab().items()}
    except DataError:
        result.notes.append(f"{named}: it has no tokenizer, so the policy's is assumed")
        tokens = {}
    ours = {index: token for token, index in encoder.tokenizer.get_vocab().items()}
    if differ := [index for index, token in ours.items() if tokens.get(index, token) != token]:
        first = min(differ)
        yield (
            f"{named}: its token {first} is {tokens[first]!r}, but the policy's is {ours[first]!r} ({len(differ):,} "
            "differ), so a KL to it is meaningless. Use a model with the policy's tokenizer."
        )
    size, policy_size = config.get_text_config().vocab_size, encoder.model_vocab_size
    if spec.role == ROLES["teacher"].section and passes.exact_teacher and policy_size and size < policy_size:
        yield (
            f"{named} has {size:,} tokens and the policy {policy_size:,}, and loss_mode="
            f"{cfg.distillation.distillation_loss.loss_mode} compares all of the policy's. Use "
            "distillation.distillation_loss.loss_mode=k3, or a teacher with at least as many."
        )
    exact = passes.exact_kl_in_loss or passes.exact_kl_in_reward
    if spec.role == ROLES["ref"].section and policy_size and (size < policy_size or (exact and size > policy_size)):
        yield f"{named} has {size:,} tokens and the policy {policy_size:,}" + (
            f". Use a reference with {'the same number' if exact else 'at least as many'}." if size < policy_size else
            ", and a full KL compares all of them. Use kl_loss_type (kl_penalty) k3, or a reference with as many."
        )  # fmt: skip


def _sizes_of_policy(cfg: Config) -> dict[str, tuple[int, int]]:
    """Return, by config key, the sizes by which the policy's heads are divided outside the actor, each with its ring
    size.
    """
    rollout, models = cfg.actor_rollout_ref.rollout, specs_of(cfg, get_device(cfg.trainer.device)).values()
    sizes = {spec.ulysses_key: spec.ulysses_and_ring for _, spec in models if spec.is_copy}
    if ENGINES[rollout.name].tensor_parallel:
        sizes[f"{_R}tensor_model_parallel_size"] = rollout.tensor_model_parallel_size, 1
    return sizes
