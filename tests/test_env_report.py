"""The description of the machine in a bug report."""

import json
import re
import sys

import yaml

import rltrain
from rltrain.config.load import masked_command
from rltrain.config.schema import Config
from rltrain.run.checkpoints.card import model_card
from rltrain.tools import env as env_report


def test_the_command_line_is_told_without_its_secrets():
    words = [
        "python", "a.wandb_api_key=abc", "reward.url=http://me:pass@host/x",
        "custom_reward_function.reward_kwargs={password: abc}", "rollout.max_num_batched_tokens=8192",
        "data.train_files=['a b.parquet']", "x={", "--dry-run",
    ]  # fmt: skip
    told = masked_command(words)
    assert "abc" not in told
    assert "me:pass" not in told
    for word in ("http://***@host/x", "max_num_batched_tokens=8192", "x={", "--dry-run"):
        assert word in told


def test_the_report_names_versions_and_devices(capsys, monkeypatch):
    argv = ["/bin/python", "-m", "rltrain.env_report", "trainer.secret=abc"]
    monkeypatch.setattr(sys, "orig_argv", argv)
    assert env_report.main([]) == 0
    text = capsys.readouterr().out
    assert "PyTorch version" in text
    found = json.loads(text[: text.index("\n}") + 2])
    assert found["rltrain"] == rltrain.__version__
    assert found["command"] == "python -m rltrain.env_report 'trainer.secret=***'"
    argv[1:] = ["a.reward_kwargs.x=1", "b={env_vars: {}}", "c=2"]
    assert model_card(Config(), 1).endswith("```bash\npython c=2\n```\n")
    assert found["driver"] is None or found["devices"]


def test_a_card_names_base_model_data_license_and_versions_without_secrets(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: qwen\n---\n")
    cfg = Config()
    cfg.actor_rollout_ref.model.path = str(tmp_path)
    cfg.data.train_files = ["s3://me:abc@host/a.parquet"]
    cfg.data.apply_chat_template_kwargs = {"api_key": "abc", "thinking": True}
    card = model_card(cfg, 7, ["openai/gsm8k", "rltrain/arithmetic"])
    head, text = card.split("---\n", 1)
    assert yaml.safe_load(head) == {
        "datasets": ["openai/gsm8k"], "license": "other", "license_name": "qwen",
        "tags": ["rltrain", "reinforcement-learning", cfg.algorithm.adv_estimator],
    }  # fmt: skip
    assert "abc" not in card
    assert "thinking=True" in text
    assert "| data sources | openai/gsm8k, rltrain/arithmetic |" in text
    assert re.search(r"\| versions \| rltrain \S+, torch \S+, transformers \S+", text)
    cfg.actor_rollout_ref.model.path = "Qwen/Qwen3-0.6B"
    assert model_card(cfg, 7).startswith("base_model: Qwen/Qwen3-0.6B\ntags:")
