"""README.md of an exported model: its origin, how it was trained, and its scores."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load, try_to_load_from_cache
from yaml import YAMLError, safe_dump

from rltrain.common import __version__
from rltrain.common.secrets import masked, masked_text
from rltrain.common.versions import installed_version
from rltrain.config.check import as_list
from rltrain.config.schema import Config
from rltrain.tools.env import command_line

# Arguments of user code, and environment variables: a published page needs neither, and either may hold a secret.
_NOT_SHOWN = ("reward_kwargs", "env_vars", "url_headers")
# Names of data sets on the hub, which are also the data sources of verl's converters.
_ON_HUB = re.compile(r"(?!rltrain/)[\w.-]+/[\w.-]+")
_SCORE = re.compile("val-core/")
_PACKAGES = ("torch", "transformers", "vllm", "vllm-ascend", "sglang")


def model_card(cfg: Config, step: int, sources: Sequence[str] = ()) -> str:
    """Return base model, data, license, step, versions and command in the format of model hubs.

    It is appended to the metadata lines (`Export.write`). sources: the data sources of the prompts.
    """
    model, rollout, algorithm = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout, cfg.algorithm
    versions = {"rltrain": __version__} | {name: installed_version(name) for name in _PACKAGES}
    rows = {
        "base model": model.path,
        "steps": str(step),
        "algorithm": f"{algorithm.adv_estimator}, {cfg.actor_rollout_ref.actor.policy_loss.loss_mode} loss",
        "prompts": ", ".join(as_list(cfg.data.train_files)),
        "data sources": ", ".join(sources),
        "answers": f"{rollout.n} per prompt at temperature {rollout.temperature}, "
        f"up to {cfg.data.max_response_length} tokens",
        "chat template": "of the base model"
        if model.custom_chat_template is None
        else "replaced; this folder contains the replacement",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    if arguments := dict(cfg.data.apply_chat_template_kwargs):
        rows["template arguments"] = ", ".join(f"{name}={value}" for name, value in masked(arguments).items())
    bounds = {"at least": cfg.data.min_pixels, "at most": cfg.data.max_pixels}
    if set_ones := [f"{bound} {count}" for bound, count in bounds.items() if count]:
        rows["images"] = f"scaled to {' and '.join(set_ones)} pixels, within the bounds of the processor"
    if model.uses_lora:
        rows["LoRA"] = (
            "the adapters are merged into these weights; the checkpoint has them separately in actor/lora_adapter"
        )
    table = "\n".join(f"| {name} | {masked_text(value)} |" for name, value in rows.items() if value)
    head = {
        # A hub cannot link to a local folder.
        "base_model": "" if model.path.startswith(("/", ".", "~")) else model.path,
        "datasets": [source for source in sources if _ON_HUB.fullmatch(source)],
        **_license(model.path),
        "tags": ["rltrain", "reinforcement-learning", algorithm.adv_estimator],
    }
    metadata = safe_dump({name: value for name, value in head.items() if value}, sort_keys=False, allow_unicode=True)
    return (
        f"{masked_text(metadata)}---\n\n# {cfg.trainer.experiment_name}\n\nTrained with rltrain {__version__}.\n\n"
        f"| | |\n|---|---|\n{table}\n\n```bash\n{command_line(_NOT_SHOWN)}\n```\n"
    )


def _license(path: str) -> dict[str, str]:
    """Return the license from the base model's card; empty if the card is not on this machine."""
    with suppress(OSError, ValueError, YAMLError):
        card = Path(path) / "README.md" if Path(path).is_dir() else try_to_load_from_cache(path, "README.md")
        head = metadata_load(str(card)) or {}
        return {name: str(head[name]) for name in ("license", "license_name", "license_link") if name in head}
    return {}


def scores(lines: Sequence[Mapping[str, Any]], step: int) -> str:
    """Return the section of a card with the first validation of a run, and its newest up to ``step``; "" if none.

    lines: lines of metrics.jsonl.
    """
    validations = [line for line in lines if line.get("step", step + 1) <= step and any(map(_SCORE.match, line))]
    ends = [validations[0], *validations[1:][-1:]] if validations else []
    names = [name for name in dict.fromkeys(name for line in ends for name in line) if _SCORE.match(name)]
    rows = [["validation", *(f"step {line['step']}" for line in ends)], ["---"] * (len(ends) + 1)]
    rows += [[name, *(f"{line[name]:.4g}" if name in line else "" for line in ends)] for name in names]
    return "\n## Scores\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) if names else ""
