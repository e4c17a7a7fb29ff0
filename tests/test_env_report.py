"""What a bug report says of the machine."""

import json
import sys

import rltrain
from rltrain.config.load import masked_command
from rltrain.config.schema import Config
from rltrain.run.checkpoints.card import model_card
from rltrain.run.report import env_report


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
