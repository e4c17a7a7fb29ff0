"""Ported verl scripts."""

import functools
import operator
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rltrain.__main__ import main as rltrain
from rltrain.common.errors import sanitize
from rltrain.config.check import check
from rltrain.config.load import load_config, to_dict
from rltrain.config.schema.keys import all_keys
from rltrain.tools.port.__main__ import main
from rltrain.tools.port.launches import launches
from rltrain.tools.port.shell import Call
from rltrain.tools.port.translate import translate
from tests.config.commands import words
from tests.config.test_launches import recorded

GRPO = """\
#!/usr/bin/env bash
set -xeuo pipefail
MODEL=${MODEL:-/models/Qwen}
prompt=$((1024 * 2))
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="['$HOME/train.parquet']"
    data.train_batch_size=256
    data.max_prompt_length=${prompt}  # two thousand
)
export WANDB_API_KEY=topsecret HCCL_CONNECT_TIMEOUT=1500 VLLM_USE_V1=1 CUDA_DEVICE_MAX_CONNECTIONS=1
python3 -m verl.trainer.main_ppo "${DATA[@]}" \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.n=5 \\
    trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 trainer.total_epochs=30 "$@" 2>&1 | tee run.log
"""


def translated(command):
    return translate([tuple(word.split("=", 1)) for word in words(command)])


def ported(tmp_path, text, *arguments, name="run.sh"):
    """Return the exit code, the settings of each launch as the new script passes them to rltrain, and the script's
    text."""
    script, new = tmp_path / name, tmp_path / "new.sh"
    script.write_text(text)
    code = main([str(script), "-o", str(new), *arguments])
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text("#!/bin/bash\nprintf '%s\\n' ---- \"${@:3}\"\n")
    stub.chmod(0o755)
    environment = {"PATH": f"{stub.parent}:/usr/bin:/bin", "HOME": "/home/me", "DATA_ROOT": "/data", "JOB_ID": "7"}
    environment |= {"SLURM_NNODES": "2", "NUM_GPUS": "8"}
    process = subprocess.run(["bash", str(new)], env=environment, capture_output=True, text=True, check=True)
    launches = [part.splitlines() for part in process.stdout.split("----\n")[1:]]
    return code, launches, new.read_text()


@pytest.mark.smoke("A launch script of verl is read without running it")
def test_a_script_becomes_what_differs_from_our_defaults(tmp_path, capsys):
    code, [settings], text = ported(tmp_path, GRPO)
    assert code == 0, capsys.readouterr().err
    assert settings == [
        "data.train_files=['/home/me/train.parquet']",
        "data.train_batch_size=256",
        "data.max_prompt_length=2048",
        "actor_rollout_ref.model.path=/models/Qwen",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=5",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=8",
        'trainer.logger=["console","wandb"]',
    ]
    # The user's folder stays a variable, a secret is not copied, and what rltrain sets itself is left out.
    assert "${HOME}" in text
    assert "topsecret" not in text
    assert "VLLM" not in text
    assert "export HCCL_CONNECT_TIMEOUT=1500" in text
    # It would slow FSDP down.
    assert "\n# export CUDA_DEVICE_MAX_CONNECTIONS=1  (left out" in text
    check(load_config(settings))


def test_secrets_of_a_script_are_not_copied(tmp_path):
    text = (
        GRPO.replace("WANDB_API_KEY=", "DSN=http://a:topsecret@h OPENAI_KEY=")
        .replace(
            "use_remove_padding=True",
            "use_remove_padding=True +reward_kwargs.openai_key=topsecret +reward_kwargs.passwd=$HOME",
        )
        .replace("+reward_kwargs", "+custom_reward_function.reward_kwargs")
    )
    _, [settings], written = ported(tmp_path, text)
    assert "topsecret" not in written
    given = {"openai_key=${oc.env:OPENAI_KEY}", "passwd=/home/me"}
    assert {f"custom_reward_function.reward_kwargs.{word}" for word in given} <= set(settings)


def test_secrets_under_unknown_keys_are_not_shown(tmp_path, capsys):
    """Neither comments nor standard error show them, even with spaces in the value. A variable of the user is not a
    secret."""
    words = "+nonsense.openai_key='topsecret 2 topsecret' +nonsense.passwd=$HOME +x.y=https://me:topsecret@h/x"
    words += " +z='{api_key: topsecret}'"
    words += (
        " reward_model.url=http://me:topsecret@h +more.headers='[\"X-Api-Key: topsecret\"]' +judge.openai_key=topsecret"
    )
    code, _, written = ported(tmp_path, GRPO.replace('"$@"', words))
    shown = capsys.readouterr().err
    assert code == 2
    assert "topsecret" not in written + shown
    assert "nonsense.openai_key=***" in written
    assert "nonsense.passwd=${HOME}" in shown


def test_sequences_of_a_script_do_not_steer_the_terminal_that_shows_the_new_one(tmp_path):
    text = GRPO.replace(
        "trainer.total_epochs=30", "trainer.total_epochs=30 trainer.experiment_name=$'a\\e]0;t\\a\\'\\\\'"
    )
    _, [settings], written = ported(tmp_path, text)
    assert "trainer.experiment_name=a\x1b]0;t\x07'\\" in settings
    assert sanitize(written) == written


def test_arguments_of_the_script_reach_its_launch(tmp_path):
    _, [settings], _ = ported(tmp_path, GRPO, "data.seed=7", "trainer.n_gpus_per_node=4")
    assert {"data.seed=7", "trainer.n_gpus_per_node=4"} <= set(settings)


def test_megatron_s_contexts_become_rings():
    new = translated("actor.megatron.context_parallel_size=4 critic.megatron.context_parallel_size=2")
    found = {
        key: value
        for key, value in new.settings.items()
        if key.endswith(("ring_attention_size", "ulysses_sequence_parallel_size"))
    }
    assert found == {"actor_rollout_ref.actor.ring_attention_size": "4", "critic.ring_attention_size": "2"}


def test_megatron_becomes_fsdp2_ulysses_and_offload():
    new = translated(
        "model_engine=megatron actor.megatron.tensor_model_parallel_size=4 actor.megatron.context_parallel_size=2 "
        "actor.megatron.expert_model_parallel_size=8 actor.megatron.param_offload=True "
        "ref.megatron.expert_model_parallel_size=8 actor.megatron.grad_offload=True "
        "ref.megatron.param_offload=True critic.megatron.optimizer_offload=True "
        "reward_model.megatron.param_offload=True actor.megatron.override_transformer_config.recompute_num_layers=1 "
        "actor.optim.lr_decay_style=cosine actor.optim.lr=2e-6 actor.optim.min_lr=2e-7 model.lora.rank=16 "
        "model.lora.target_modules=[linear_qkv,linear_proj] "
        "actor.megatron.override_transformer_config.moe_router_bias_update_rate=1e-3 "
        "actor.megatron.router_replay.mode=R2"
    )
    assert not new.lost
    expected = words(
        "actor.ulysses_sequence_parallel_size=2 actor.fsdp_config.expert_parallel_size=8 "
        "actor.fsdp_config.tensor_parallel_size=4 "
        "actor.fsdp_config.param_offload=True ref.fsdp_config.param_offload=True "
        "critic.model.fsdp_config.optimizer_offload=True reward_model.model.fsdp_config.param_offload=True "
        "actor.optim.lr_scheduler_type=cosine actor.optim.min_lr_ratio=0.1 model.lora_rank=16 "
        "model.target_modules=[q_proj,k_proj,v_proj,o_proj] actor.router_bias_update_rate=1e-3 "
        "actor.router_replay.mode=R2"
    )
    assert set(expected) <= {f"{key}={value}" for key, value in new.settings.items()}
    assert not [key for key in new.settings if "megatron." in key or "ring_attention" in key]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.01", "moe_aux_loss_coeff"),
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path=t.yaml", "multi_turn.environment"),
        ("actor_rollout_ref.actor.optim.lr_decay_style=linear", "lr_decay_style"),
        ("trainer.resume_from_path=/c/global_step_8", "rltrain.checkpoint export /c/global_step_8/actor FOLDER"),
        ("nonsense.key=1", "nonsense.key"),
    ],
)
def test_what_cannot_be_kept_is_listed_and_ends_in_2(tmp_path, capsys, setting, told):
    code, [settings], text = ported(tmp_path, GRPO.replace('"$@"', setting))
    assert code == 2
    assert told in text
    assert told in capsys.readouterr().err
    assert setting not in settings
    check(load_config(settings))


SIZE = "actor.ppo_micro_batch_size=64 actor.ulysses_sequence_parallel_size=2 trainer.n_gpus_per_node=8"
RS = "algorithm.rollout_correction.rollout_rs"


@pytest.mark.parametrize(
    ("written", "about", "kept"),
    [
        # A loss of verl's that does not read a key.
        ("actor.policy_loss.loss_mode=gspo actor.loss_agg_mode=token-mean", "loss", "actor.policy_loss.loss_mode=gspo"),
        (
            "actor.policy_loss.loss_mode=gspo algorithm.rollout_correction.bypass_mode=True",
            "loss",
            "actor.policy_loss.loss_mode=gspo",
        ),
        # Defaults of verl's that a script relies on.
        ("actor.clip_ratio=0.1", "clip", "actor.clip_ratio=0.1 actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.2"),
        ("actor.clip_ratio=0.1 actor.policy_loss.loss_mode=gpg", "clip_ratio_", ""),
        ("", "n_gpus", "trainer.n_gpus_per_node=8"),
        ("", "rollout.", "rollout.name=vllm rollout.tensor_model_parallel_size=2"),
        ("", "logger", 'trainer.logger=["console","wandb"]'),
        # Old spellings of several keys become one.
        (
            f"{RS}=geometric {RS}_threshold=1.001 {RS}_threshold_lower=0.99",
            "rollout_rs",
            f"{RS}=seq_mean_k1 {RS}_threshold=0.999001_1.0101",
        ),
        (SIZE, "micro_batch", "actor.ppo_micro_batch_size_per_gpu=16"),
    ],
)
def test_settings_keep_what_they_mean_in_verl(written, about, kept):
    new = translated(written)
    assert not new.lost
    assert sorted(words(kept)) == sorted(f"{key}={value}" for key, value in new.settings.items() if about in key)


def test_every_launch_of_a_script_is_ported(tmp_path):
    text = """
    python examples/data_preprocess/gsm8k.py --local_dir /d
    for lr in 1e-6 2e-6; do
        ray job submit --address=http://x -- python3 -m verl.trainer.main_ppo data.train_files=/t.parquet \
            actor_rollout_ref.model.path=/m actor_rollout_ref.actor.optim.lr=$lr
    done
    sbatch <<EOF
srun bash -c "/opt/conda/bin/python -m verl.trainer.main_ppo data.train_files=/s.parquet \
actor_rollout_ref.model.path=/m data.seed=3"
EOF
    """
    _, launches, new = ported(tmp_path, text)
    found = [[each for each in one if each.startswith(("data", "actor_rollout_ref.actor"))] for one in launches]
    assert found == [
        ["data.train_files=/t.parquet"],
        ["data.train_files=/t.parquet", "actor_rollout_ref.actor.optim.lr=2e-6"],
        ["data.train_files=/s.parquet", "data.seed=3"],
    ]
    assert "rltrain data NAME" in new


def test_variables_the_script_expects_stay_variables(tmp_path):
    text = """
    python3 -m verl.trainer.main_ppo data.train_files=$DATA_ROOT/t.parquet actor_rollout_ref.model.path=/m \
        trainer.nnodes=$SLURM_NNODES data.train_batch_size=$((256 * NUM_GPUS)) trainer.experiment_name=$JOB_ID
    """
    code, [settings], new = ported(tmp_path, text)
    assert code == 0
    assert {"data.train_files=/data/t.parquet", "trainer.nnodes=2", "data.train_batch_size=256"} <= set(settings)
    assert ': "${DATA_ROOT:?' in new
    assert "NUM_GPUS was taken to be 1" in new
    assert "SLURM_NNODES was" not in new


@pytest.mark.parametrize(
    "text",
    [
        "python3 -m $'a\\ntouch owned #' -x\nRUN -m $'verl.y\\ntouch owned #' data.train_files=/t",
        "RUN.main_ppo data.train_files=/t trainer.experiment_name='$(touch owned)`touch owned`\"; touch owned #'$HOME",
    ],
)
def test_nothing_of_a_script_is_run_by_the_new_one(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = text.replace("RUN.main", "RUN -m verl.trainer.main").replace("RUN", "python3")
    _, launches, _ = ported(tmp_path, text + "\n" + GRPO)
    assert len(launches) == 2
    assert not (tmp_path / "owned").exists()


def test_no_key_of_a_file_is_run_by_the_new_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kwargs = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    config = f"actor_rollout_ref: {{model: {{path: /m}}}}\ndata: {{train_files: /a}}\n{kwargs}.$(touch owned): 1\n"
    config += f'"{kwargs}.x)\\ntouch owned #": 2\n'
    _, [settings], text = ported(tmp_path, config, name="a\ntouch owned.yaml")
    assert "actor_rollout_ref.rollout.engine_kwargs.vllm.$(touch owned)=1" in settings, text
    assert not (tmp_path / "owned").exists()


def test_a_whole_tree_says_what_is_verl_s_default_or_ours(tmp_path):
    tree = OmegaConf.create({"other": {f"key{number}": 0 for number in range(60)}})
    written = words(
        "model.path=/m data.train_files=[/a,/b] actor.clip_ratio=0.3 actor.clip_ratio_low=null "
        "actor.clip_ratio_high=null actor.optim.lr=1.0e-6 actor.optim.min_lr=1.0e-7 rollout.name=vllm "
        "rollout.tensor_model_parallel_size=1 trainer.n_gpus_per_node=8 trainer.logger=[console]"
    )
    tree.merge_with_dotlist(written)
    code, [settings], text = ported(tmp_path, OmegaConf.to_yaml(tree), name="config.yaml")
    assert code == 0, text
    kept = "model.path=/m actor.clip_ratio=0.3 actor.optim.min_lr_ratio=0.1 rollout.name=vllm"
    lists = ['data.train_files=["/a", "/b"]', 'trainer.logger=["console"]']
    assert sorted(settings) == sorted([*words(f"{kept} trainer.n_gpus_per_node=8"), *lists])


@pytest.mark.parametrize("nodes", ["1 trainer.n_gpus_per_node=$NUM_GPUS", "$SLURM_NNODES"])
def test_a_size_over_ranks_that_variables_decide_is_listed(tmp_path, nodes):
    size = f"actor_rollout_ref.actor.ppo_micro_batch_size=64 trainer.nnodes={nodes}"
    code, _, new = ported(tmp_path, GRPO.replace("trainer.n_gpus_per_node=8", "").replace('"$@"', size))
    assert code == 2
    assert "set actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu to its share of one rank" in new
    assert "ppo_micro_batch_size_per_gpu=" not in new


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ("actor.megatron.override_transformer_config.moe_z_loss_coeff=1e-3", False),
        ("actor.veomni.anything=1", False),
        ("actor.megatron.use_mbridge=True", True),
        ("actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True", True),
    ],
)
def test_only_what_is_known_to_be_harmless_is_called_so(setting, kept):
    new = translated(setting)
    assert [line.partition(":")[0] for line in new.lost] == ([] if kept else words(setting))
    assert kept or "not what" not in "".join(new.decisions)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("/home/me/sft_rl/verl/trainer/main_ppo.py", ""),
        ("/home/me/sft_rl/my_ppo.py", "is not verl's main_ppo"),
        ("examples/data_preprocess/gsm8k.py", "data files"),
        ("-m verl.trainer.fsdp_sft_trainer", "fine-tuning"),
    ],
)
def test_a_trainer_is_known_by_its_own_name(entry, told):
    found, said = launches([Call(("python3", *entry.split(), "data.seed=1"), {})], [])
    text = "".join([*said, *(line for launch in found for line in launch.lost)])
    assert told in text
    assert bool(told) == bool(text)
    assert bool(found) == (told in ("", "is not verl's main_ppo"))


def test_a_config_name_is_read_from_beside_the_script(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {seed: 5, max_prompt_length: 9}")
    text = """
    HERE=$(cd "$(dirname "$0")" && pwd)
    python3 -m verl.trainer.main_ppo --config-path="$HERE/config" --config-name mine data.train_files=/t.parquet \
        actor_rollout_ref.model.path=/m data.max_prompt_length=11
    """
    code, [settings], _ = ported(tmp_path, text)
    assert code == 0
    assert {"data.seed=5", "data.max_prompt_length=11"} <= set(settings)


def test_words_that_a_shell_has_expanded_are_ported(capsys):
    words = ["data.train_files=/t.parquet", "actor_rollout_ref.model.path=/m", "--config-name=ppo_trainer"]
    assert rltrain(["port", "--overrides", *words]) == 0
    assert "actor_rollout_ref.model.path=/m" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"), [("echo hello", "does not start a recognizable verl run"), (None, "cannot be read")]
)
def test_what_is_no_launch_script_is_said(tmp_path, capsys, text, told):
    path = tmp_path / "x.sh"
    if text:
        path.write_text(text)
    assert main([str(path)]) == 2
    assert told in capsys.readouterr().err


def test_classes_of_ones_own_come_with_their_keys(tmp_path):
    own = "data.custom_cls.path=pkg://my.data data.custom_cls.name=Mine +data.hint.level=3 data.video_key=clips"
    _, [settings], text = ported(tmp_path, GRPO.replace("actor_rollout_ref.rollout.n=5", own))
    assert "data.custom_cls=pkg://my.data:Mine" in settings
    assert "data.own_keys.hint.level=3" in settings
    assert "data.own_keys.video_key=clips" in settings
    assert load_config(settings).config.data.own_keys == {"hint": {"level": 3}, "video_key": "clips"}
    assert "was data.custom_cls.path and data.custom_cls.name" in text


RUNNING = [launch for launch in recorded() if launch.outcome == "runs"]
# What `translate` writes out of verl's defaults.
ADDED = ("n_gpus_per_node", "trainer.logger", "rollout.name", "tensor_model_parallel_size", "clip_ratio_low")


def at(tree, key):
    """Return the leaf of a nested dictionary under a dotted key."""
    return functools.reduce(operator.getitem, key.split("."), tree)


@pytest.mark.few(5)
@pytest.mark.parametrize("launch", RUNNING[::9], ids=lambda launch: f"{launch.version} {launch.name}")
def test_a_ported_launch_means_what_it_means_unported(launch):
    words = [word.partition("=") for word in launch.words if not word.startswith("--")]
    new = translate([(key, text) for key, _, text in words])
    assert not new.lost
    direct, ours = (
        to_dict(load_config(settings).config)
        for settings in (
            ["=".join((key, text)) for key, _, text in words],
            [f"{k}={v}" for k, v in new.settings.items()],
        )
    )
    different = [key for key in all_keys() if at(direct, key) != at(ours, key)]
    assert not [
        key for key in different if not key.endswith((*ADDED, "default_local_dir", "clip_ratio_high", "loss_agg_mode"))
    ]


def test_checkpoints_of_verls_stay_where_they_are(tmp_path, monkeypatch):
    names = "trainer.project_name=p trainer.experiment_name=e"
    _, [settings], text = ported(tmp_path, GRPO.replace('"$@"', f"trainer.default_local_dir=$HOME/ckpts {names}"))
    assert "trainer.default_local_dir=/home/me/ckpts-rltrain" in settings
    assert "# was ${HOME}/ckpts, where verl's checkpoints are" in text
    # The default folder has verl's name, too.
    monkeypatch.chdir(tmp_path)
    assert not [each for each in ported(tmp_path, GRPO.replace('"$@"', names))[1][0] if "default_local" in each]
    Path("checkpoints/p/e").mkdir(parents=True)
    Path("checkpoints/p/e/latest_checkpointed_iteration.txt").write_text("10")
    _, [settings], _ = ported(tmp_path, GRPO.replace('"$@"', names))
    assert "trainer.default_local_dir=checkpoints/p/e-rltrain" in settings
