"""Hydra's files: lists of defaults, and the tree that a verl run saves."""

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from rltrain.common.errors import ConfigError
from rltrain.config.budgets import PassBudget, budgets
from rltrain.config.load import load_config
from rltrain.config.notes import other_meanings
from rltrain.config.schema.keys import get
from rltrain.config.step_passes import make_step_passes
from rltrain.config.verl.defaults import chosen_settings
from rltrain.config.verl.hydra import compose, named
from tests.config.commands import A

# "57 key=value": in the trees that verl 0.5 and 0.7 (and 9: 0.9) save, by default.
LIB, LENGTH = f"{A}model.external_lib", f"{A}rollout.max_model_len"
SAVED = (Path(__file__).parent / "verl_saved.txt").read_text().splitlines()


def saved(version, **chosen):
    """Return the tree that a verl run saves, with the settings of its script and resolved interpolations."""
    tree = OmegaConf.create()
    for line in SAVED:
        versions, _, setting = line.partition(" ")
        key, _, value = setting.partition("=")
        if version in versions:
            OmegaConf.update(tree, key, json.loads(value))
    for key, value in chosen.items():
        OmegaConf.update(tree, key, value)
    OmegaConf.resolve(tree)
    return OmegaConf.to_container(tree)


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


CHOSEN = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 5,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.model.path": "/models/Q",
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2,
    "data.max_prompt_length": 777,
}


@pytest.mark.parametrize("version", "579")
def test_a_saved_tree_of_verl_means_what_it_meant(version, tmp_path):
    """The tree loads without a note, although it sets every key."""
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    chosen = CHOSEN | {f"{actor}policy_loss.loss_mode": "sapo", f"{actor}clip_ratio": 0.1}
    chosen |= {f"{actor}ppo_micro_batch_size_per_gpu": 4, f"{rollout}log_prob_micro_batch_size_per_gpu": 4}
    chosen |= {f"{rollout}val_kwargs.temperature": 0.6}
    del chosen[f"{actor}use_dynamic_bsz"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved(version, **chosen)))
    loaded = load_config([], [str(tmp_path / "config.yaml")])
    assert not loaded.warnings
    assert not list(other_meanings(loaded))
    for key, value in chosen.items():
        assert OmegaConf.select(OmegaConf.structured(loaded.config), key) == value
    assert set(budgets(loaded.config).values()) == {PassBudget(4 * (777 + 512), None, 4)}
    settings = loaded.config.actor_rollout_ref
    assert not settings.rollout.val_kwargs.greedy
    assert settings.rollout.enforce_eager is (True if version == "5" else None)
    assert make_step_passes(loaded.config).aggregation == "seq-mean-token-mean"
    # In verl clip_ratio_low and clip_ratio_high are 0.2 unless they are set.
    assert (settings.actor.clip_ratio_low, settings.actor.clip_ratio_high) == (0.2, 0.2)


@pytest.mark.parametrize("version", "579")
def test_a_saved_tree_means_what_its_script_meant(version):
    written = chosen_settings(saved(version, **CHOSEN))
    assert written.items() >= CHOSEN.items()
    # Values that differ between verl and rltrain are kept, and no others.
    assert len(written) < 24
    as_wandb_saves_it = {key: {"desc": None, "value": value} for key, value in saved(version, **CHOSEN).items()}
    own = {"_wandb": {"desc": None, "value": {"cli_version": "0.19"}}, "wandb_version": 1}
    assert chosen_settings(own | as_wandb_saves_it) == written


@pytest.mark.parametrize("key", ["trainer.n_gpu_per_node", "actor_rollout_ref.actor.mtp.enable", "data.seeed"])
def test_a_key_of_nobody_in_a_saved_tree_is_told(key):
    tree = OmegaConf.create(saved("9"))
    OmegaConf.update(tree, key, 7, force_add=True)
    with pytest.raises(ConfigError, match=key):
        load_config([], [chosen_settings(OmegaConf.to_container(tree))])


def test_a_text_with_an_interpolation_in_it_was_chosen():
    chosen = {
        "data.train_files": "${data.root}/train.parquet", "trainer.experiment_name": "${trainer.project_name}-lr1",
        "data.val_files": "${oc.select:data.root,/d}/${data.x}",
    }  # fmt: skip
    tree = saved("7") | {}
    follows = {"trainer.nnodes": "${oc.select:a.b,${oc.select:c,null}}", "data.seed": "${trainer.seed}"}
    for key, value in (chosen | follows).items():
        section, name = key.split(".")
        tree[section][name] = value
    written = chosen_settings(tree)
    assert written.items() >= chosen.items()
    assert not follows.keys() & written.keys()


RECIPE = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - shared/sampling@actor_rollout_ref.rollout
  - data: gsm8k
  - optional data@data: not_there
  - _self_
algorithm: {adv_estimator: grpo}
"""


def test_defaults_lists_are_composed_in_hydras_order(tmp_path):
    write(
        tmp_path,
        {
            "run.yaml": RECIPE,
            "shared/sampling.yaml": "n: 4\ntemperature: 0.7",
            "data/gsm8k.yaml": "defaults: [common]\nmax_prompt_length: 100",
            "data/common.yaml": "max_prompt_length: 50\nmax_response_length: 60",
        },
    )
    assert compose(tmp_path / "run.yaml") == {
        "actor_rollout_ref": {"rollout": {"n": 4, "temperature": 0.7}},
        # Without _self_ the list follows the file, as in Hydra.
        "data": {"max_prompt_length": 50, "max_response_length": 60},
        "algorithm": {"adv_estimator": "grpo"},
    }
    loaded = load_config([], [str(tmp_path / "run.yaml")])
    assert loaded.config.actor_rollout_ref.rollout.n == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Our name and another one for it, as in verl's reward_model.yaml.
        ("reward_model.model.external_lib: ${actor_rollout_ref.model.external_lib}", f"{LIB}=[]"),
        (f"{LIB}: json\ncritic.model.external_lib: ${{oc.select:{LIB},null}}", f"{LIB}=['json']"),
        (f"critic.grad_clip: 0.5\n{A}actor.grad_clip: ${{critic.grad_clip}}", f"{A}actor.optim.clip_grad=0.5"),
        # Keys that the schema lacks: what was written, or verl's default.
        (f"{LENGTH}: ${{{A}rollout.prompt_length}}\n{A}rollout.prompt_length: 700", f"{LENGTH}=700"),
        (f"{LENGTH}: ${{{A}rollout.prompt_length}}", f"{LENGTH}=512"),
        ("trainer.experiment_name: x-${critic.grad_clip}-${data.dataloader_num_workers}",
         "trainer.experiment_name=x-1.0-8"),
        ("trainer.callbacks: ${trainer.logger}", "trainer.callbacks=['console', 'tensorboard']"),
        # A size that is divided among the ranks.
        (f"{A}actor.ppo_micro_batch_size: ${{{A}actor.ppo_mini_batch_size}}\ntrainer.n_gpus_per_node: 8",
         f"{A}actor.ppo_micro_batch_size_per_gpu=32"),
    ],
)  # fmt: skip
def test_an_interpolation_resolves_as_in_hydra(text, expected, tmp_path):
    tree = OmegaConf.create()
    for line in text.splitlines():
        key, _, value = line.partition(": ")
        OmegaConf.update(tree, key, yaml.safe_load(value))
    (tmp_path / "run.yaml").write_text(OmegaConf.to_yaml(tree))
    key, _, value = expected.partition("=")
    assert str(get(load_config([], [str(tmp_path / "run.yaml")]).config, key)) == value


def test_packages_say_where_a_file_goes(tmp_path):
    run = "defaults: [/groups/a@algorithm, groups/b, _self_]"
    files = {"run.yaml": run, "groups/a.yaml": "gamma: 0.5", "groups/b.yaml": "# @package _global_\ndata: {seed: 3}"}
    assert compose(write(tmp_path, files) / "run.yaml") == {"algorithm": {"gamma": 0.5}, "data": {"seed": 3}}


def test_all_missing_files_are_told_beside_other_mistakes(tmp_path):
    write(tmp_path, {"run.yaml": "defaults: [mine, other/place, _self_]"})
    with pytest.raises(ConfigError) as caught:
        load_config(["data.sed=1"], [str(tmp_path / "run.yaml"), str(tmp_path / "none.yaml")])
    for part in ("mine.yaml", "other/place.yaml", "none.yaml: there is no such file", "data.sed"):
        assert part in str(caught.value)


def test_config_name_stands_for_verls_files_or_for_ones_own(tmp_path):
    assert named(None, "ppo_trainer") == named(None, "ppo_megatron_trainer.yaml") == named("config", None) == {}
    assert named("recipe/config", "dapo_trainer")["reward_model"] == {"reward_manager": "dapo"}
    write(tmp_path, {"mine.yaml": "defaults: [ppo_trainer, _self_]\ndata: {seed: 5}"})
    assert named(str(tmp_path), "mine") == {"data": {"seed": 5}}
    with pytest.raises(ConfigError, match=r"--config-path .* --config-name other: there is no file other.yaml in"):
        named(str(tmp_path), "other")
