"""Recognition of configurations that belong to other trainers than verl."""

import pytest

from rltrain.common.errors import ConfigError
from rltrain.config.load import load_config
from rltrain.tools.port.__main__ import main as port
from tests.config.commands import problems

FILES = {
    "EasyR1": "data: {rollout_batch_size: 8}\nworker: {actor: {global_batch_size: 4}}\ntrainer: {max_steps: 6}\n",
    "MindSpeed RL": "defaults: [{model: [qwen25_7b]}]\nmegatron_training: {model: qwen25_7b, train_iters: 100}\n"
    "actor_config: {lr: 1e-6}\nrl_config: {n_samples_per_prompt: 8}\ngenerate_config: {limit_mm_image_per_prompt: 1}\n",
    "AReaL": "experiment_name: a\nallocation_mode: vllm:d4+fsdp:d4\ngconfig: {n_samples: 4}\nactor: {path: m}\n"
    "train_dataset: {path: d}\n",
    "TRL": "model_name_or_path: m\ndataset_name: d\nnum_generations: 8\nbeta: 0.0\n",
    "OpenRLHF": "pretrain: m\nprompt_data: d\nn_samples_per_prompt: 8\n",
    "ms-swift": "rlhf_type: grpo\nmodel: m\ntrain_type: full\nnum_generations: 8\nper_device_train_batch_size: 2\n",
    "LLaMA-Factory": "model_name_or_path: m\nstage: ppo\nfinetuning_type: lora\nper_device_train_batch_size: 1\n",
}
PAGES = {
    trainer: f"docs/from-{trainer.lower().replace(' ', '-')}.md"
    for trainer in ("EasyR1", "MindSpeed RL", "OpenRLHF", "TRL")
}


@pytest.mark.parametrize("trainer", FILES)
def test_whose_a_file_is_stands_in_one_sentence(tmp_path, trainer):
    file = tmp_path / "run.yaml"
    file.write_text(FILES[trainer])
    for read in (lambda: load_config(["data.train_files=/d", "actor_rollout_ref.model.path=/m"], [str(file)]),
                 lambda: port.__wrapped__([str(file)])):  # fmt: skip
        with pytest.raises(ConfigError) as raised:
            read()
        assert f"this is a configuration of {trainer}, which rltrain does not support" in str(raised.value)
        assert PAGES.get(trainer, "docs/from-others.md") in str(raised.value)
        assert "unknown key" not in str(raised.value)
        # Our names of the keys that have one, by section for the files that have sections.
        assert ("\n  num_generations: actor_rollout_ref.rollout.n" in str(raised.value)) == (
            "num_gen" in FILES[trainer]
        )


@pytest.mark.parametrize(
    ("launch", "trainer", "name"),
    [
        ("ray job submit --address=h:1 -- python3 -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 --prompt_data d",
         "OpenRLHF", "prompt_data: data.train_files"),
        ("deepspeed --module openrlhf.cli.train_ppo --pretrain m", "OpenRLHF", "pretrain: actor_rollout_ref.model"),
        ("accelerate launch --config_file z.yaml g.py --model_name_or_path m --num_generations 8", "TRL",
         "num_generations: actor_rollout_ref.rollout.n"),
        ("trl grpo --config x.yaml", "TRL", ""),
        ("swift rlhf --rlhf_type grpo --train_type full --num_generations=8", "ms-swift", "num_generations: actor_"),
        ("llamafactory-cli train a.yaml", "LLaMA-Factory", ""),
        ("python3 -m areal.launcher.local a.py --config a.yaml actor.path=m", "AReaL", ""),
        ("python cli/train_grpo.py --config-name grpo_7b | tee log", "MindSpeed RL", ""),
    ],
)  # fmt: skip
def test_a_launch_of_another_trainer_is_named_with_its_page(tmp_path, launch, trainer, name):
    script = tmp_path / "run.sh"
    script.write_text(f"pip install trl llamafactory\n{launch}\n")
    with pytest.raises(ConfigError, match=f": this is a launch of {trainer}, which rltrain does not support") as raised:
        port.__wrapped__([str(script)])
    assert PAGES.get(trainer, "docs/from-others.md") in str(raised.value)
    assert name in str(raised.value)
    assert str(raised.value).count("this is a launch of") == 1


def test_a_launch_of_verl_with_names_of_other_trainers_in_it_is_ported(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo data.train_files=/areal/trl/a.parquet "
                      "actor_rollout_ref.model.path=/llamafactory/m\n")  # fmt: skip
    assert port.__wrapped__([str(script)]) in (0, 2)
    assert "/areal/trl/a.parquet" in capsys.readouterr().out


def test_keys_and_launches_of_easyr1_name_its_page(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main config=config.yaml worker.rollout.n=6\n")
    with pytest.raises(ConfigError, match=r"verl\.trainer\.main: .*docs/from-easyr1\.md"):
        port.__wrapped__([str(script)])
    lines = problems("config=examples/config.yaml worker.actor.optim.lr=1e-6 worker.rollout.n=5")
    lines = [line for line in lines if "docs/from-easyr1.md" in line]
    assert lines[0].startswith("config=examples/config.yaml: ")
    assert lines[1].startswith("worker.actor.optim.lr=1e-06, worker.rollout.n=5: ")
