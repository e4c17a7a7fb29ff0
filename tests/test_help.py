"""The output of --help."""

import re

import pytest

from rltrain.common.errors import ConfigError
from rltrain.config.help import help_text
from rltrain.config.schema.keys import all_keys, sections
from rltrain.main_ppo import main


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_help_is_an_index_of_two_screens(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: ")
    assert len(lines) <= 80
    for section, sentence in sections().items():
        assert [line for line in lines if f"  {section.split('.')[-1]} " in line and sentence[:8] in line], section
    assert "train_batch_size (" not in "\n".join(lines)


def test_help_of_all_has_every_key_and_section_once():
    text = help_text("all")
    for section in sections():
        assert len(re.findall(rf"^{re.escape(section)}: ", text, re.MULTILINE)) == 1
    assert len(re.findall(r"^  [a-z]\w* \(", text, re.MULTILINE)) == len(all_keys())


def test_help_shows_what_works_and_answers_for_the_rest():
    assert "test_freq (int | str) = -1\n      Validate every" in help_text("trainer")
    assert "balance_batch" not in help_text("all")
    assert len(all_keys()) <= 380
    assert "has no effect: samples are always spread" in help_text("trainer.balance_batch")
    assert "has no effect: every step generates with" in help_text("rollout.mode")
    assert help_text("skip").startswith("skip: refused: every step generates new responses")
    assert "tail=carry_over" in help_text("async_training")


def test_help_finds_keys_and_sections_by_the_end_of_their_names():
    assert "critic.optim.lr (float)" in help_text("lr")
    assert {"critic.model", "reward_model.model"} <= {line.split()[0] for line in help_text("model").splitlines()}
    assert "clip_grad (float)" in help_text("actor_rollout_ref.actor.grad_clip"), "verl's older name"


@pytest.mark.parametrize(
    ("words", "key"),
    [("learning rate", "actor.optim.lr"), ("resume", "trainer.resume_mode"), ("KL", "actor.use_kl_loss"),
     ("eval", "trainer.test_freq"), ("batch size", "data.train_batch_size"), ("early stopping", "trainer.patience"),
     ("Early-stopping patience", "trainer.patience")],
)  # fmt: skip
def test_help_searches_names_and_sentences(words, key, capsys):
    assert main(["--help", *words.split()]) == 0
    assert f"{key}: " in capsys.readouterr().out


def test_help_of_words_that_are_a_name_is_that_name():
    assert "use_kl_loss (bool)" in help_text("use kl loss")
    assert "hf upload" in help_text("push to hub")


def test_help_for_what_is_not_there_names_what_is():
    with pytest.raises(ConfigError, match=r"--help algorithm\.adv_estimator"):
        help_text("adv_estimatr")
