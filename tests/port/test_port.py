"""Scripts of verl's, ported."""

import functools
import operator
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rltrain.__main__ import main as rltrain
from rltrain.config.check import check
from rltrain.config.load import load_config, to_dict
from rltrain.config.schema.keys import all_keys
from rltrain.tools.port.__main__ import main
from rltrain.tools.port.launches import launches
from rltrain.tools.port.shell import Call, restored
from rltrain.tools.port.translate import translate
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
export WANDB_API_KEY=topsecret HCCL_CONNECT_TIMEOUT=1500 VLLM_USE_V1=1
python3 -m verl.trainer.main_ppo "${DATA[@]}" \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.n=5 \\
    trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 trainer.total_epochs=30 "$@" 2>&1 | tee run.log
"""
M = "actor_rollout_ref.actor.megatron."


def ported(tmp_path, text, *arguments, name="run.sh"):
    """Exit code, the settings of each launch as their script gives them to rltrain, and the text of the script."""
    script, new = tmp_path / name, tmp_path / "new.sh"
    script.write_text(text)
    code = main([str(script), "-o", str(new), *arguments])
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text("#!/bin/bash\nprintf '%s\\n' ---- \"${@:3}\"\n")
    stub.chmod(0o755)
    environment = {
        "PATH": f"{stub.parent}:/usr/bin:/bin",
        "HOME": "/home/me",
        "DATA_ROOT": "/data",
        "SLURM_NNODES": "2",
        "JOB_ID": "7",
    }
    process = subprocess.run(["bash", str(new)], env=environment, capture_output=True, text=True, check=True)
    launches = [part.splitlines() for part in process.stdout.split("----\n")[1:]]
    return code, launches, new.read_text()


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
    check(load_config(settings))


def test_a_variable_that_would_slow_fsdp_down_is_left_out_and_said(tmp_path):
    _, _, text = ported(tmp_path, GRPO.replace("VLLM_USE_V1=1", "CUDA_DEVICE_MAX_CONNECTIONS=1"))
    assert "\n# export CUDA_DEVICE_MAX_CONNECTIONS=1  (left out" in text


def test_arguments_of_the_script_reach_its_launch(tmp_path):
    _, [settings], _ = ported(tmp_path, GRPO, "data.seed=7", "trainer.n_gpus_per_node=4")
    assert {"data.seed=7", "trainer.n_gpus_per_node=4"} <= set(settings)


def test_megatron_becomes_fsdp2_ulysses_and_offload(tmp_path):
    lines = [
        "model_engine=megatron",
        M + "tensor_model_parallel_size=4",
        M + "pipeline_model_parallel_size=2",
        M + "context_parallel_size=2",
        M + "expert_model_parallel_size=8",
        "actor_rollout_ref.ref.megatron.expert_model_parallel_size=8",
        M + "param_offload=True",
        M + "grad_offload=True",
        "actor_rollout_ref.ref.megatron.param_offload=True",
        "critic.megatron.optimizer_offload=True",
        "+" + M + "override_transformer_config.recompute_granularity=full",
        "+" + M + "override_transformer_config.recompute_num_layers=1",
        "actor_rollout_ref.actor.optim.lr_decay_style=cosine",
        "actor_rollout_ref.actor.optim.lr=2e-6",
        "actor_rollout_ref.actor.optim.min_lr=2e-7",
        "actor_rollout_ref.model.lora.rank=16",
        "actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_proj]",
    ]
    code, [settings], text = ported(tmp_path, GRPO.replace('"$@"', " ".join(lines)))
    assert code == 0
    assert {
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.actor.fsdp_config.expert_parallel_size=8",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "critic.model.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",
        "actor_rollout_ref.model.lora_rank=16",
        "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj]",
    } <= set(settings)
    assert "megatron." not in "".join(settings)
    assert "in the place of TP and PP" in text


@pytest.mark.parametrize(
    ("section", "place"), [("reward_model", "reward_model.model.fsdp_config"), ("critic", "critic.model.fsdp_config")]
)
def test_a_setting_of_a_model_stays_with_that_model(section, place):
    assert translate([(f"{section}.megatron.param_offload", "True")]).settings[f"{place}.param_offload"] == "True"


def test_routing_replay_of_a_backend_is_that_of_the_actor():
    key = "actor_rollout_ref.actor.router_replay.mode"
    for backend, mode in (("megatron", "R2"), ("megatron", "R3"), ("veomni", "R3")):
        section = f"actor_rollout_ref.actor.{backend}.router_replay"
        new = translate([(f"{section}.mode", mode), (f"{section}.record_file", "/tmp/record")])
        assert new.settings == {**translate([]).settings, key: mode}
        assert not new.lost
    assert translate([(M + "router_replay.mode", "R4")]).lost
    assert translate([("actor_rollout_ref.ref.megatron.router_replay.mode", "R3")]).lost


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (M + "override_transformer_config.moe_aux_loss_coeff=0.01", "moe_aux_loss_coeff"),
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path=t.yaml", "multi_turn.environment"),
        ("actor_rollout_ref.actor.optim.lr_decay_style=linear", "lr_decay_style"),
        (
            "actor_rollout_ref.rollout.quantization=fp8",
            "actor_rollout_ref.rollout.quantization=fp8: the engine is given",
        ),
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


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("policy_loss.loss_mode=gspo A.loss_agg_mode=token-mean", ["policy_loss.loss_mode=gspo"]),
        ("policy_loss.loss_mode=gspo A.loss_agg_mode=seq-mean-token-mean",
         ["policy_loss.loss_mode=gspo", "loss_agg_mode=seq-mean-token-mean"]),
        ("policy_loss.loss_mode=cispo A.loss_agg_mode=token-sum",
         ["policy_loss.loss_mode=cispo", "loss_agg_mode=token-sum"]),
        ("policy_loss.loss_mode=gspo algorithm.rollout_correction.bypass_mode=True", []),
    ],
)  # fmt: skip
def test_what_a_loss_of_verl_s_does_not_read_is_left_out(tmp_path, written, kept):
    text = "python3 -m verl.trainer.main_ppo data.train_files=/t.parquet actor_rollout_ref.model.path=/m A."
    code, [settings], _ = ported(tmp_path, (text + written).replace("A.", "actor_rollout_ref.actor."))
    assert code == 0
    found = [each.removeprefix("actor_rollout_ref.actor.") for each in settings if "loss" in each]
    assert sorted(found) == sorted(kept)


def test_defaults_of_verl_that_a_script_relies_on_are_written(tmp_path):
    text = "python3 -m verl.trainer.main_ppo data.train_files=/t.parquet actor_rollout_ref.model.path=/m"
    code, [settings], _ = ported(tmp_path, text + " actor_rollout_ref.actor.clip_ratio=0.1")
    assert code == 0
    assert settings[2:] == [
        "actor_rollout_ref.actor.clip_ratio=0.1",
        "actor_rollout_ref.actor.clip_ratio_low=0.2",
        "actor_rollout_ref.actor.clip_ratio_high=0.2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "trainer.n_gpus_per_node=8",
        'trainer.logger=["console","wandb"]',
    ]


def test_old_spellings_of_several_keys_become_one(tmp_path):
    old = "rollout_rs=geometric rollout_rs_threshold=1.001 rollout_rs_threshold_lower=0.99"
    lines = " ".join(f"algorithm.rollout_correction.{word}" for word in old.split())
    code, [settings], _ = ported(tmp_path, GRPO.replace('"$@"', lines))
    assert code == 0
    assert {each for each in settings if "rollout_rs" in each} == {
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.999001_1.0101",
    }


def test_sizes_over_all_ranks_become_sizes_of_one(tmp_path):
    sizes = "actor_rollout_ref.actor.ppo_micro_batch_size=64 actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    _, [settings], _ = ported(tmp_path, GRPO.replace('"$@"', sizes))
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16" in settings


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


def test_variables_in_each_other_s_names_stay_apart():
    assert restored("__A__B__C__ __B__", {"B": "__B__", "A__B__C": "__A__B__C__"}) == "${A__B__C} ${B}"


def test_a_whole_tree_says_what_is_verl_s_default_or_ours(tmp_path):
    tree = OmegaConf.create({"other": {f"key{number}": 0 for number in range(60)}})
    for key, value in {
        "actor_rollout_ref.model.path": "/m",
        "data.train_files": "/t.parquet",
        "actor_rollout_ref.actor.clip_ratio": 0.3,
        "actor_rollout_ref.actor.clip_ratio_low": None,
        "actor_rollout_ref.actor.clip_ratio_high": None,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.optim.min_lr": 1e-7,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "trainer.n_gpus_per_node": 8,
        "trainer.logger": ["console"],
    }.items():
        OmegaConf.update(tree, key, value)
    code, [settings], text = ported(tmp_path, OmegaConf.to_yaml(tree), name="config.yaml")
    assert code == 0, text
    assert sorted(settings[2:]) == [
        "actor_rollout_ref.actor.clip_ratio=0.3",
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",
        "actor_rollout_ref.rollout.name=vllm",
        'trainer.logger=["console"]',
        "trainer.n_gpus_per_node=8",
    ]


@pytest.mark.parametrize(("loss", "bounds"), [("gspo", 2), ("cispo", 2), ("geo_mean", 2), ("kl_cov", 0), ("gpg", 0)])
def test_verl_s_clip_bounds_are_written_where_they_are_read(loss, bounds):
    actor = "actor_rollout_ref.actor."
    new = translate([(actor + "clip_ratio", "0.3"), (actor + "policy_loss.loss_mode", loss)])
    assert sum(new.settings.get(f"{actor}clip_ratio_{side}") == "0.2" for side in ("low", "high")) == bounds


@pytest.mark.parametrize(
    "words",
    [
        "ppo_micro_batch_size=$MICRO_BATCH_SIZE",
        "ppo_micro_batch_size=64 trainer.n_gpus_per_node=$NUM_GPUS",
        "ppo_micro_batch_size=64 trainer.nnodes=$SLURM_NNODES",
    ],
)
def test_a_size_over_ranks_that_variables_decide_is_listed(tmp_path, words):
    text = "python3 -m verl.trainer.main_ppo data.train_files=/t.parquet actor_rollout_ref.model.path=/m "
    script = tmp_path / "run.sh"
    script.write_text(f"{text} actor_rollout_ref.actor.{words}")
    code = main([str(script), "-o", str(tmp_path / "new.sh")])
    new = (tmp_path / "new.sh").read_text()
    assert code == 2
    assert "set actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu to its share of one rank" in new
    assert "ppo_micro_batch_size_per_gpu=" not in new


@pytest.mark.parametrize(
    ("key", "kept"),
    [
        (M + "override_transformer_config.moe_z_loss_coeff=1e-3", False),
        (M + "override_transformer_config.moe_router_topk=4", False),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.amsgrad=True", False),
        ("critic.optim.override_optimizer_config.exp_avg_dtype=bf16", False),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.decoupled_weight_decay=False", False),
        ("actor_rollout_ref.actor.veomni.anything=1", False),
        (M + "use_mbridge=True", True),
        (M + "override_transformer_config.apply_rope_fusion=False", True),
        (M + "override_ddp_config.overlap_grad_reduce=True", True),
        (M + "override_transformer_config.moe_router_dtype=fp32", True),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True", True),
    ],
)
def test_only_what_is_known_to_be_harmless_is_called_so(key, kept):
    name, _, value = key.partition("=")
    new = translate([(name, value)])
    assert [line.partition(":")[0] for line in new.lost] == ([] if kept else [key])
    assert kept or "not what" not in "".join(new.decisions)


def test_the_step_of_a_routers_bias_is_ours():
    new = translate([(f"{M}override_transformer_config.moe_router_bias_update_rate", "1e-3")])
    assert new.settings["actor_rollout_ref.actor.router_bias_update_rate"] == "1e-3"
    assert new.lost == []


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("/home/me/sft_rl/verl/trainer/main_ppo.py", ""),
        ("/home/me/sft_rl/my_ppo.py", "another trainer"),
        ("examples/data_preprocess/gsm8k.py", "data files"),
        ("-m verl.trainer.fsdp_sft_trainer", "fine-tuning"),
        ("-m verl.model_merger", "merging"),
    ],
)
def test_a_trainer_is_known_by_its_own_name(entry, told):
    found, said = launches([Call(("python3", *entry.split(), "data.seed=1"), {})], [])
    text = "".join([*said, *(line for launch in found for line in launch.lost)])
    assert told in text
    assert bool(told) == bool(text)
    assert bool(found) == (told in ("", "another trainer"))


@pytest.mark.parametrize("word", ["~trainer.test_freq", "~trainer.test_freq=5"])
def test_a_key_that_is_taken_out_is_not_passed_over(word):
    ((launch,), _) = launches([Call(("python3", "-m", "verl.trainer.main_ppo", "data.seed=1", word), {})], [])
    assert dict(launch.settings) == {"data.seed": "1"}
    assert [line.partition(": ")[::2] for line in launch.lost] == [
        (word, "a key that is taken out of verl's configuration is not looked for: see that it is not here")
    ]


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


def test_a_saved_configuration_is_ported(tmp_path):
    config = "actor_rollout_ref: {model: {path: /m}, rollout: {n: 4, name: vllm}}\ndata: {train_files: [/a, /b]}"
    code, [settings], _ = ported(tmp_path, config, name="config.yaml")
    assert code == 0
    assert {'data.train_files=["/a", "/b"]', "actor_rollout_ref.rollout.n=4"} <= set(settings)


def test_words_that_a_shell_has_expanded_are_ported(capsys):
    words = ["data.train_files=/t.parquet", "actor_rollout_ref.model.path=/m", "--config-name=ppo_trainer"]
    assert rltrain(["port", "--overrides", *words]) == 0
    assert "actor_rollout_ref.model.path=/m" in capsys.readouterr().out


def test_another_trainer_is_not_taken_for_ours(tmp_path):
    text = "python3 -m recipe.sppo.main_sppo data.train_files=/t.parquet actor_rollout_ref.model.path=/m"
    code, _, new = ported(tmp_path, text)
    assert code == 2
    assert "recipe.sppo.main_sppo is another trainer" in new


@pytest.mark.parametrize(("text", "told"), [("echo hello", "starts no run"), (None, "cannot be read")])
def test_what_is_no_launch_script_is_said(tmp_path, capsys, text, told):
    path = tmp_path / "x.sh"
    if text:
        path.write_text(text)
    assert main([str(path)]) == 2
    assert told in capsys.readouterr().err


def test_no_jail_means_nothing_is_run(tmp_path, monkeypatch, capsys):
    jail = tmp_path / "jail.py"
    jail.write_text("import sys; sys.exit(3)")
    monkeypatch.setattr("rltrain.tools.port.shell.JAIL", jail)
    Path(tmp_path / "x.sh").write_text(GRPO)
    assert main([str(tmp_path / "x.sh")]) == 2
    assert "--overrides" in capsys.readouterr().err


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
    """The leaf of a nested dictionary under a dotted key."""
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
    assert "# was ${HOME}/ckpts, where verl's checkpoints lie" in text
    # The default folder has verl's name, too.
    monkeypatch.chdir(tmp_path)
    assert not [each for each in ported(tmp_path, GRPO.replace('"$@"', names))[1][0] if "default_local" in each]
    Path("checkpoints/p/e").mkdir(parents=True)
    Path("checkpoints/p/e/latest_checkpointed_iteration.txt").write_text("10")
    _, [settings], _ = ported(tmp_path, GRPO.replace('"$@"', names))
    assert "trainer.default_local_dir=checkpoints/p/e-rltrain" in settings
