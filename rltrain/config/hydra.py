"""YAML files as Hydra's users write them -> the settings they stand for, without Hydra.

Problem: verl's recipes are files with a ``defaults:`` list and a search path, and a run of verl saves its whole tree,
500 to 900 keys of which the user wrote thirty. Choice: a list is composed as Hydra does it (`compose`); verl's own
files stand for verl's defaults, so nothing need be read of them; and a tree that a program wrote is read as the script
it was saved from (`as_written`): what only repeats verl's defaults counts as not written. Left out: Hydra's resolvers,
``override`` of a choice made in an earlier file, and groups chosen on the command line.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rltrain.config.keys import all_keys, is_known
from rltrain.config.renames import rename
from rltrain.errors import ConfigError

Tree = dict[str, Any]

# verl's own files by name, where they set anything that has a meaning here beside verl's defaults.
_DAPO: Tree = {"reward_model": {"reward_manager": "dapo"}, "trainer": {"project_name": "verl-dapo"}}
_STOCK: dict[str, Tree] = {
    "ppo_trainer": {}, "ppo_megatron_trainer": {}, "ppo_veomni_trainer": {}, "ppo_torchtitan_trainer": {},
    "ppo_mindspeed_trainer": {}, "ppo_fsdp_turbo_trainer": {}, "dapo_trainer": _DAPO, "dapo_megatron_trainer": _DAPO,
}  # fmt: skip
# The folders of verl's config tree: a file of one of these that is not here holds verl's defaults.
_STOCK_GROUPS = (
    "actor algorithm critic data distillation engine legacy_reward_impl model model_engine npu_profile optim profiler "
    "ref reward reward_manager reward_model rollout transfer_queue"
).split()

# A tree of so many keys was written by a program.
_WHOLE = 150
# Known keys whose default is another one here, with verl's: in a whole tree this value was not chosen by anybody.
_NOT_CHOSEN = {
    "*.use_dynamic_bsz": (False,),
    "*.log_prob_use_dynamic_bsz": (False,),
    "*.model_dtype": ("fp32",),
    "*.compute_dtype": ("bfloat16",),
    "*.trust_remote_code": (False,),
    "actor_rollout_ref.actor.checkpoint.save_contents": (["model", "optimizer", "extra"],),
    "actor_rollout_ref.actor.strategy": ("fsdp", "megatron"),
    "actor_rollout_ref.rollout.seed": (42,),
    "actor_rollout_ref.rollout.dtype": ("bfloat16",),
    "actor_rollout_ref.rollout.max_num_seqs": (1024,),
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": (2048,),
    "algorithm.rollout_correction.rollout_is_threshold": (2.0,),
    "critic.model.path": ("~/models/deepseek-llm-7b-chat",),
    "critic.*_max_token_len_per_gpu": (32768,),
    "reward.num_workers": (8,),
    "reward_model.model.path": ("~/models/FsfairX-LLaMA3-RM-v0.1",),
    "reward_model.forward_max_token_len_per_gpu": (32768,),
    "trainer.device": ("cuda",),
}
# verl's defaults, 0.5 to main, of keys that are not keys here, by the last part of the key.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "attention_backend": ("flash",), "audio_key": ("audios",), "backend": ("naive",), "balance_batch": (True,),
    "calculate_log_probs": (True,), "context_parallel_size": (1,), "data_loader_seed": (42,), "nccl_timeout": (600,),
    "data_parallel_size": (1,), "dataloader_num_workers": (8,), "default_agent_loop": ("single_turn_agent",),
    "dtype": ("bfloat16",), "entropy_from_logits_chunk_size": (2048,), "exp_avg_dtype": ("fp32",),
    "exp_avg_sq_dtype": ("fp32",), "expert_model_parallel_size": (1,), "expert_parallel_size": (1,),
    "filter_overlong_prompts_workers": (1,), "format": ("hermes",), "forward_only": (True,), "fsdp_size": (-1,),
    "hybrid_engine": (True,), "image_key": ("images",), "image_patch_size": (14,), "impl_backend": ("torch",),
    "load_format": ("dummy", "dummy_dtensor", "dummy_megatron"), "load_weight": (True,), "name": ("???", "naive",
    "custom_reward_manager", "compute_score"), "logprobs_mode": ("processed_logprobs",), "model_engine": ("dp",),
    "lr_decay_style": ("linear", "constant"), "lr_wsd_decay_style": ("exponential",), "main_grads_dtype": ("fp32",),
    "max_concurrent": (64,), "max_inflight_gen_batches": (1,), "max_parallel_calls": (1,), "metric": ("acc",),
    "max_tool_response_length": (256,), "memory_limit_mb": (1024,), "mode": ("sync", "async", "disabled"),
    "model_dtype": ("fp32",), "model_family": ("auto",), "n_gpus_per_node": (8,), "num_workers": (1, 8),
    "optimizer": ("adam", "AdamW"), "optimizer_impl": ("torch.optim",), "pad_bshd_to_minibatch_max": (True,),
    "pad_to_length_bucket": (512, 1024), "pipeline_model_parallel_size": (1,), "vanilla_mbridge": (True,),
    "ray_wait_register_center_timeout": (300,), "recompute_modules": (["core_attn"],), "reshard_after_forward": (True,),
    "return_multi_modal_inputs": (True,), "return_raw_chat": (True,), "reward_loop_source": ("register",),
    "reweight_method": ("pow",), "save_contents": (["model", "optimizer", "extra"],), "scheduling_policy": ("fcfs",),
    "load_contents": (["model", "optimizer", "extra"],), "seed": (42,), "sequence_parallel": (True,),
    "skip_dump_dir": ("/tmp/rollout_dump",), "skip_tokenizer_init": (True,), "source": ("register",),
    "strategy": ("fsdp", "megatron"), "strict": (True,), "tensor_model_parallel_size": (1,), "video_key": ("videos",),
    "tokenization_sanity_check_mode": ("strict",), "tool_response_truncate_side": ("middle",), "use_v1": (True,),
    "total_training_steps": (-1,), "ulysses_sequence_parallel_size": (1,), "use_distributed_optimizer": (True,),
    "use_legacy_worker_impl": ("auto",), "use_mbridge": (True,), "use_remove_padding": (True,), "step_start": (-1,),
    "use_reward_loop": (True,), "use_torch_compile": (True,), "weight_decay_incr_style": ("constant",),
    "weight_pow": (2.0,), "zero_indexed_step": (True,), "step_end": (-1,),
}  # fmt: skip
# Sections with a switch of their own, which is off by default: what else stands in them has no meaning meanwhile.
_INERT = [
    *("*profil*", "*nsight_options*", "*transfer_queue.*", "distillation.*", "skip.*", "*.mtp.*", "*.qat.*", "*.v1.*"),
    *("*reward_model.rollout.*", "*.disaggregation.*", "*.prometheus.*", "*.tiled_mlp.*", "*.model.lora.*"),
    *("*.layer_name_map.*", "*.muon_*", "*continuous_token*", "*.sandbox_fusion.*"),
]
_SWITCHES = ("enable", "enabled", "trainer_mode", "rank", "url")
_FOLLOWS = re.compile(r"\$\{(oc\.select:)?[\w.]+[,}]")


def compose(file: Path, roots: Sequence[Path] = ()) -> Tree:
    """The settings of a YAML file and of all files that its ``defaults:`` list names, later ones over earlier ones.

    roots: folders to look in beside that of the file. Raises ConfigError with every file that is missing.
    """
    composer = _Composer([file.parent, *roots])
    composer.take(file, "", "")
    if composer.problems:
        raise ConfigError("\n".join(composer.problems))
    composer.tree.pop("hydra", None)
    return composer.tree


def stock(name: str) -> Tree | None:
    """What verl's own file of that name sets beside verl's defaults, or None for a name that is not verl's."""
    return _STOCK.get(Path(name).name.removesuffix(".yaml").removesuffix(".yml"))


def named(config_path: str | None, config_name: str | None) -> Tree:
    """What Hydra's ``--config-path`` and ``--config-name`` stand for. Raises ConfigError."""
    name = (config_name or "ppo_trainer").removesuffix(".yaml")
    folder = Path(config_path or ".").expanduser()
    if config_path and (folder / f"{name}.yaml").is_file():
        return compose(folder / f"{name}.yaml")
    if (known := stock(name)) is not None:
        return known
    if not config_path and (folder / f"{name}.yaml").is_file():
        return compose(folder / f"{name}.yaml")
    where = f"in {folder}" if config_path else "here; give its folder with --config-path"
    raise ConfigError(f"--config-name {name}: there is no file {name}.yaml {where}, and it is none of verl's own.")


def as_written(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree by dotted keys, without what nobody chose: class names, values that are missing, and in a tree that a
    program wrote verl's defaults."""
    leaves = {key: value for key, value in _leaves(tree, "") if value != "???"}
    if len(leaves) < _WHOLE:
        return leaves
    return {key: value for key, value in leaves.items() if not _a_default(key, value)}


def _a_default(written: str, value: Any) -> bool:
    key = rename(written)
    if value is None or (isinstance(value, str) and _FOLLOWS.match(value)):
        return True
    if not is_known(key):
        last = key.rpartition(".")[2]
        inert = last not in _SWITCHES and any(fnmatchcase(written, pattern) for pattern in _INERT)
        return inert or value in (False, 0, "", [], {}) or value in _DEFAULTS.get(last, ())
    others = next((values for pattern, values in _NOT_CHOSEN.items() if fnmatchcase(key, pattern)), ())
    # What differs between the two is a choice where it is not verl's default, even if it is ours.
    return value in others if others else key in all_keys() and value == all_keys()[key].default


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and rename(key) not in all_keys():
            yield from _leaves(value, f"{key}.")
        elif name != "_target_" and value != {}:
            yield key, value


class _Composer:
    """Walks defaults lists depth first, as Hydra orders them."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots, self.tree, self.problems = list(roots), Tree(), list[str]()
        self._chosen: dict[str, str] = {}

    def take(self, file: Path, group: str, package: str) -> None:
        """Merge ``file`` and what its list names. group: its folder within its root; package: the dotted key that its
        content goes under."""
        text, content = read_yaml(file)
        if header := re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE):
            package = "" if header[1] == "_global_" else package if header[1] in ("_group_", "_here_") else header[1]
        if not group:
            self.roots += _search_path(content, file)
        entries = content.pop("defaults", None) or []
        own = "_self_" in entries
        # Without a `_self_` the file itself comes first, and its list overrides it.
        for entry in entries if own else ["_self_", *entries]:
            if entry == "_self_":
                _merge(self.tree, _under(package, content))
            else:
                for name, option in entry.items() if isinstance(entry, dict) else [(entry, "")]:
                    self._entry(str(name), option, group, package, file)

    def _entry(self, name: str, option: Any, group: str, package: str, file: Path) -> None:
        words = name.split()
        path, _, place = words[-1].partition("@")
        for one in option if isinstance(option, list) else [option]:
            if one is None or one == "_self_":
                continue
            one = re.sub(r"\$\{(\w+)\}", lambda match: self._chosen.get(match[1], ""), str(one))
            full = posixpath.normpath(posixpath.join("/", group, path, one)).lstrip("/")
            self._chosen[path] = one
            below = posixpath.dirname(full) if not place else ""
            inner = place if place else posixpath.relpath(below or ".", group or ".").replace("/", ".").strip(".")
            under = (
                ""
                if place == "_global_"
                else ".".join(part for part in (package, inner.removeprefix("_here_")) if part)
            )
            found = next((at for root in self.roots if (at := root / f"{full}.yaml").is_file()), None)
            if found:
                self.take(found, posixpath.dirname(full), under)
            elif (known := stock(full)) is not None:
                _merge(self.tree, known)
            elif full.split("/")[0] not in _STOCK_GROUPS and "optional" not in words:
                where = ", ".join(str(root) for root in dict.fromkeys(self.roots))
                self.problems.append(f"{file}: there is no {full}.yaml in {where} (defaults: {name}).")


def read_yaml(file: Path) -> tuple[str, Tree]:
    """Text and content of a file with a mapping. Raises ConfigError."""
    try:
        text = file.read_text()
        content = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else {}
    except OSError as error:
        raise ConfigError(f"--config {file}: {'there is no such file' if not file.exists() else error}.") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: expected a mapping of keys to values.")
    return text, {str(key): value for key, value in content.items()}


def _search_path(content: Tree, file: Path) -> list[Path]:
    """Hydra's search path, from here or from a folder above the file, where its repository begins."""
    hydra = content.get("hydra")
    entries = (hydra.get("searchpath") if isinstance(hydra, dict) else None) or content.get("hydra.searchpath") or []
    bases = [Path.cwd(), *file.absolute().parents]
    places = [re.sub(r"^(file|pkg)://", "", str(entry)) for entry in entries]
    places = [
        place.replace(".", "/") if str(entry).startswith("pkg:") else place
        for place, entry in zip(places, entries, strict=True)
    ]
    return [base / place for place in places for base in bases if (base / place).is_dir()]


def _under(package: str, content: Tree) -> Tree:
    for part in reversed(package.split(".") if package else []):
        content = {part: content}
    return content


def _merge(tree: Tree, other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            # Copied, because later files are merged into it.
            tree[key] = OmegaConf.to_container(OmegaConf.create(dict(value))) if isinstance(value, Mapping) else value
