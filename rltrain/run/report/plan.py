"""The plan of a run as text, printed before anything is started."""

from __future__ import annotations

from rltrain.common.device import get_device
from rltrain.common.logs import count
from rltrain.common.secrets import masked_text
from rltrain.config.budgets import PassBudget
from rltrain.config.notes import compares_nothing
from rltrain.config.passes import PASSES
from rltrain.config.schema import Config
from rltrain.config.schema.declarations import TOKEN_MEAN
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.spec import specs_of
from rltrain.trainer.plan import Plan


def describe(plan: Plan, config: Config) -> str:
    """Return the plan as text. An evaluation has no steps and uses only the policy and a reward model."""
    trains, wanted, kind = plan.passes.trains, config.trainer.device, get_device(config.trainer.device).kind
    device = kind if kind == wanted else f"{wanted}: {kind} here"  # the kind that ``auto`` selects on this machine
    rows = [
        *([("algorithm", _algorithm(plan, config))] if trains else []),
        ("devices", f"{plan.num_nodes} x {plan.devices_per_node} = {plan.num_devices} ({device})"),
        *(_training(plan, config) if trains else [("engine replicas", f"{_replicas(plan, config)})")]),
        *_rewards(plan, config),
        *_tools(config),
        ("longest sequence", f"{config.data.max_prompt_length + config.data.max_response_length:,} tokens"),
        *([("steps", _steps(plan, config))] if trains else []),
        *_validation(plan, config),
        *([("saving", _saving(plan, config))] if trains else []),
    ]
    width = max(len(name) for name, _ in rows)
    return "plan\n" + "\n".join(f"  {name.ljust(width)}  {value}" for name, value in rows)


def _training(plan: Plan, config: Config) -> list[tuple[str, str]]:
    """Return the rows that apply only to training."""
    return [
        ("data-parallel", f"{plan.ranks['actor']} (sequence-parallel {plan.sequence_parallel_size}, "
         f"tensor-parallel {plan.tensor_parallel_size}, at most "
         f"{plan.most_samples_per_rank:,} samples each)"),
        ("prompts per step", f"{plan.prompts_per_step:,}"),
        ("samples per step", f"{plan.samples_per_step:,} ({count(plan.answers_per_prompt, 'answer')} to each prompt)"),
        *([] if plan.passes.supervised else [("engine replicas", f"{_replicas(plan, config)}, with about "
         f"{plan.samples_per_replica:,} samples)")]),
        ("optimizer steps per step", f"{plan.optimizer_steps_per_step} (mini-batches of "
         f"{count(plan.prompts_per_mini_batch, 'prompt')} = {count(plan.samples_per_mini_batch, 'sample')})"),
        ("a step runs", plan.passes.describe(plan.num_mini_batches)),
        *(("micro-batch", row) for row in _micro_batches(plan, config)),
        *_more_rows(plan, config),
    ]  # fmt: skip


def _replicas(plan: Plan, config: Config) -> str:
    rollout = config.actor_rollout_ref.rollout
    devices = count(rollout.tensor_model_parallel_size, "device")
    return f"{plan.num_engine_replicas} ({rollout.name}, each on {devices}"


def _algorithm(plan: Plan, config: Config) -> str:
    """Return a text on the training signal."""
    actor, teacher = config.actor_rollout_ref.actor, config.distillation.distillation_loss
    distance = f"{teacher.loss_mode} to the teacher" + " as a cost of each token" * teacher.use_policy_gradient
    if config.sft.enabled:
        turns = "the last assistant turn" if config.sft.turns == "last" else "all assistant turns"
        return f"supervised: negative log-likelihood of {turns}, {actor.loss_agg_mode or TOKEN_MEAN}"
    if config.distillation.is_alone:
        return f"{distance} only, {actor.loss_agg_mode or TOKEN_MEAN}"
    single = " (ONE RESPONSE PER PROMPT: THE SCORE ITSELF)" if compares_nothing(config) else ""
    more = f", and {teacher.distillation_loss_coef:g} x {distance}" if config.distillation.enabled else ""
    estimator, loss = config.algorithm.adv_estimator, actor.policy_loss.loss_mode
    return f"{estimator} advantages{single}, {loss} loss, {plan.passes.aggregation}{more}"


def _micro_batches(plan: Plan, config: Config) -> list[str]:
    """Return the budgets of the passes of a step. Passes with equal budgets share a line."""
    # Note for models whose number of data-parallel ranks differs from the actor's.
    others = {ranks: f", of which there are {ranks}" for ranks in {*plan.ranks.values()} - {plan.ranks["actor"]}}
    sharing: dict[tuple[PassBudget, int], list[str]] = {}
    for name, step_pass in PASSES.items():
        if plan.passes.makes(name, plan.num_mini_batches):
            sharing.setdefault((plan.budgets[name], plan.ranks[step_pass.role]), []).append(name)
    return [
        f"at most {budget} per data-parallel rank{others.get(its_ranks, '')}: {', '.join(names)}"
        for (budget, its_ranks), names in sharing.items()
    ]


def _more_rows(plan: Plan, config: Config) -> list[tuple[str, str]]:
    """Return rows that only some algorithms have."""
    rows: list[tuple[str, str]] = []
    if (images := plan.images) and images.most_rows:
        videos = ", and data.video_max_frames and video_max_pixels a video: two frames are an image"
        rows.append((
            "images", f"in {images.share:.0%} of the prompts, at most {count(images.most_images, 'image')} "
            f"({images.most_rows:,} patches or tiles, {images.most_tokens:,} tokens) in one (data.max_pixels bounds an "
            f"image{videos * bool(images.videos)})",
        ))  # fmt: skip
    for role, (kind, spec) in specs_of(config, get_device(config.trainer.device), plan.passes).items():
        if kind is PolicyModel and role != "actor" and not spec.is_copy:
            rows.append(("reference" if role == "ref" else role.replace("_", " "), spec.path))
    if plan.passes.values:
        steps = config.critic.ppo_epochs * (plan.prompts_per_step // plan.critic_prompts_per_mini_batch)
        rows.append(("critic", f"{count(steps, 'optimizer step')} per step"))
    rollout = config.actor_rollout_ref.rollout
    if rollout.stops_early:
        ends = f"the step ends when {plan.prompts_per_step:,} are answered"
        rows.append((f"tail, {rollout.tail}", f"{plan.prompts_started:,} prompts are started; {ends}"))
    if config.algorithm.filter_groups.enable:
        rows.append(
            ("dynamic sampling", f"at most {plan.max_generation_rounds} rounds of {plan.prompts_per_round:,} prompts")
        )
    return rows


def _rewards(plan: Plan, config: Config) -> list[tuple[str, str]]:
    """Return rows on the scorers."""
    if plan.passes.supervised:
        return []
    rows = [("reward", _reward(config))] if config.reward_model.classifies else []
    if config.reward_model.runs_scorers:
        judge, where, limit_s = config.reward.judge, "", f"{config.reward.timeout_s:g} s per response"
        if config.reward.url:
            where = f"at {config.reward.url}, each with {config.reward.url_concurrency} responses at a time"
        scorer = {
            "none": "alone",
            "beside": "in addition to the scorer",
            "first": "if the scorer does not accept the response",
        }
        if config.reward_model.judges:
            rows.append(("judging", f"on the devices, {scorer[judge.rule]}"))
        elif judge.url:
            where = f"with the judge {judge.model} at {judge.url} {scorer[judge.rule]}, "
            where += f"{judge.max_concurrency} requests at a time in total"
            limit_s = f"{judge.timeout_s:g} s a request"
        workers = f"{plan.num_reward_workers} process{'es' if plan.num_reward_workers > 1 else ''}"
        rows.append(("scoring", masked_text(f"{workers} {where}").rstrip() + f", at most {limit_s}"))
    return rows


def _reward(config: Config) -> str:
    """Return a text on the use of a reward model's score."""
    model = config.reward_model
    terms = [f"{model.weight:g} x the reward model's score"]
    terms += [f"{model.rule_weight:g} x the scorer's"] if model.runs_scorers else []
    penalty = " - overlong penalty" if model.reward_manager == "dapo" and model.overlong_buffer.enable else ""
    alone = "" if model.runs_scorers else " (the only score; reward_model.rule_weight adds the scorer's)"
    return " + ".join(terms) + penalty + alone


def _steps(plan: Plan, config: Config) -> str:
    epochs, limit = config.trainer.total_epochs, config.trainer.total_training_steps
    if plan.steps_per_epoch is None:
        unknown = f"{epochs} epochs (their length is known once data.train_files is read)"
        return f"{limit:,}, or {unknown} if those end earlier" if limit else unknown
    left_out = (plan.num_prompts or 0) - plan.steps_per_epoch * plan.prompts_per_round
    tail = f", {left_out} prompts of each left out as an incomplete batch" if left_out else ""
    steps = f"{plan.total_steps:,} ({plan.steps_per_epoch:,} per epoch of {plan.num_prompts:,} prompts{tail})"
    if not limit:
        return f"{steps}, until trainer.total_epochs={epochs}"
    if plan.total_steps == limit:
        return f"{steps}, until trainer.total_training_steps={limit}"
    num_epochs = -(-limit // plan.steps_per_epoch)
    return (
        f"{steps}, until trainer.total_epochs={epochs}, which comes before trainer.total_training_steps={limit} "
        f"(for those set total_epochs={num_epochs})"
    )


def _every(steps: int | str, plan: Plan) -> str:
    if isinstance(steps, str):
        of_steps = f" ({count(plan.steps_per_epoch, 'step')})" if plan.steps_per_epoch else ""
        return f"after every epoch{of_steps}"
    return "every step" if steps == 1 else f"every {steps:,} steps"


def _validation(plan: Plan, config: Config) -> list[tuple[str, str]]:
    trainer, val = config.trainer, config.actor_rollout_ref.rollout.val_kwargs
    every = f"{_every(trainer.test_freq, plan)} and after the last" if trainer.tests_regularly else "after the last"
    every = every if trainer.validates_after(1, 1, None) else ""
    before = "before the first step" if trainer.val_before_train else ""
    joint = ", " if trainer.tests_regularly else " and "
    when = joint.join(part for part in (before, every) if part)
    how = "greedy" if val.greedy else f"{count(val.n, 'response')} per prompt at temperature {val.temperature:g}"
    how = "loss per token" if config.sft.enabled else how
    how = how if trainer.val_only else f"{when}: {how}"
    return [("validation", how)] if config.data.val_files and (when or trainer.val_only) else []


def _tools(config: Config) -> list[tuple[str, str]]:
    turns = config.actor_rollout_ref.rollout.multi_turn
    how = f"{count(turns.max_parallel_calls, 'call')} per turn, at most {turns.tool_timeout_s:g} s each"
    return [("tools", f"of {turns.place}; {how}")] if turns.place else []


def _saving(plan: Plan, config: Config) -> str:
    trainer, keep = config.trainer, config.trainer.max_actor_ckpt_to_keep or 0
    when = [_every(trainer.save_freq, plan)] if trainer.saves_regularly else []
    when += [f"{trainer.save_every_s:,.0f} s after the last"] if trainer.saves_by_time else []
    retention = f"; the newest {keep} are kept (trainer.max_actor_ckpt_to_keep)" if keep >= 1 and when else ""
    when += ["at the end"] if trainer.save_at_end else []
    return f"{' and '.join(when) or 'never'}, in {trainer.default_local_dir}{retention}"
