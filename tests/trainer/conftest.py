"""Fixtures of tests that run whole steps in this process."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

from tests.tiny import save_tiny_tokenizer
from tests.trainer.steps import engine_is_off


@pytest.fixture
def make(process_group, twisted_trainer):
    """make(**changes): a trainer whose scores differ from answer to answer, and whose engine is a little off."""

    def trainer(**changes):
        made = twisted_trainer(**changes)
        engine_is_off(made)
        return made

    return trainer


@pytest.fixture
def reward_model(tmp_path):
    folder = tmp_path / "reward_model"
    save_tiny_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}={{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=None, num_labels=1,
        initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder
