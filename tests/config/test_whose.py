"""Whose a configuration is that is none of verl's."""

import pytest

from rltrain.base.errors import ConfigError
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
        assert f"this is a configuration of {trainer}, which rltrain does not read" in str(raised.value)
        assert PAGES.get(trainer, "docs/from-others.md") in str(raised.value)
        assert "unknown key" not in str(raised.value)


def test_keys_and_launches_of_easyr1_name_its_page(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main config=config.yaml worker.rollout.n=6\n")
    with pytest.raises(ConfigError, match=r"verl\.trainer\.main: .*docs/from-easyr1\.md"):
        port.__wrapped__([str(script)])
    lines = problems("config=examples/config.yaml worker.actor.optim.lr=1e-6 worker.rollout.n=5")
    lines = [line for line in lines if "docs/from-easyr1.md" in line]
    assert lines[0].startswith("config=examples/config.yaml: ")
    assert lines[1].startswith("worker.actor.optim.lr=1e-06, worker.rollout.n=5: ")
