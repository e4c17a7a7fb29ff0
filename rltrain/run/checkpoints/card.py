"""README.md of an exported model: its origin and how it was trained."""

from __future__ import annotations

from rltrain.common import __version__
from rltrain.config.check import as_list
from rltrain.config.schema import Config
from rltrain.run.report.env_report import command_line

# Arguments of user code, and environment variables: a published page needs neither, and either may hold a secret.
_NOT_SHOWN = ("reward_kwargs", "env_vars", "url_headers")


def model_card(cfg: Config, step: int) -> str:
    """Return base model, data, step and command in the format of model hubs.

    It follows the lines that describe the kind of model (`Export.write`).
    """
    model, rollout, algorithm = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout, cfg.algorithm
    rows = {
        "base model": model.path,
        "steps": str(step),
        "algorithm": f"{algorithm.adv_estimator}, {cfg.actor_rollout_ref.actor.policy_loss.loss_mode} loss",
        "prompts": ", ".join(as_list(cfg.data.train_files)),
        "answers": f"{rollout.n} a prompt at temperature {rollout.temperature}, "
        f"up to {cfg.data.max_response_length} tokens",
        "chat template": "of the base model"
        if model.custom_chat_template is None
        else "replaced; this folder has the one in use",
    }
    if arguments := dict(cfg.data.apply_chat_template_kwargs):
        rows["template arguments"] = ", ".join(f"{name}={value}" for name, value in arguments.items())
    bounds = {"at least": cfg.data.min_pixels, "at most": cfg.data.max_pixels}
    if set_ones := [f"{bound} {count}" for bound, count in bounds.items() if count]:
        rows["images"] = f"scaled to {' and '.join(set_ones)} pixels, within the bounds of the processor"
    if model.uses_lora:
        rows["LoRA"] = (
            "the adapters are merged into these weights; the checkpoint holds them alone in actor/lora_adapter"
        )
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    # A local folder is not a name that a hub could link.
    base = "" if model.path.startswith(("/", ".", "~")) else f"base_model: {model.path}\n"
    return (
        f"{base}tags: [rltrain, reinforcement-learning]\n---\n\n"
        f"# {cfg.trainer.experiment_name}\n\nTrained with rltrain {__version__}.\n\n| | |\n|---|---|\n{table}\n\n"
        f"```bash\n{command_line(_NOT_SHOWN)}\n```\n"
    )
