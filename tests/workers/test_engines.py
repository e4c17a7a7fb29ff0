"""The table of engines and the one place that makes them."""

import importlib

import pytest
import torch
from torch import nn
from transformers import Qwen3Config

from rltrain.base.errors import ConfigError
from rltrain.config.schema.engines import ENGINES, Engine
from rltrain.workers.rollout.contract import RolloutEngine
from rltrain.workers.rollout.settings import make_engine
from rltrain.workers.rollout.vllm.engine import _refuse_half_head
from tests.workers.engines import rollout_of, settings_of


@pytest.mark.parametrize("name", ENGINES)
def test_every_adapter_has_the_methods_of_the_contract(name):
    module, _, adapter = ENGINES[name].factory.partition(":")
    contract = {method for method in vars(RolloutEngine) if not method.startswith("_")}
    assert {"generate", "load_weights", "sleep"} <= contract
    assert contract <= set(dir(getattr(importlib.import_module(module), adapter)))


def test_a_new_engine_is_one_file_and_one_row(tmp_path, monkeypatch):
    (tmp_path / "own_engine.py").write_text(
        "class Own:\n    def __init__(self, settings):\n        self.settings = settings\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ENGINES, "own", Engine(factory="own_engine:Own"))
    settings = settings_of(Qwen3Config(), rollout_of(name="own"))
    assert make_engine(settings).settings is settings


def test_a_vllm_that_rounds_logits_is_refused_under_a_head_in_float32():
    """Versions that read ``head_dtype`` keep it in their LogitsProcessor; what falls back says the model's dtype."""
    processor = nn.Identity()
    model = nn.Sequential(nn.Linear(2, 2), processor)
    for found in (None, torch.bfloat16):
        processor.head_dtype = found
        with pytest.raises(ConfigError, match="fp32_head=True: this vLLM computes the head in the model's dtype"):
            _refuse_half_head(model)
    processor.head_dtype = torch.float32
    _refuse_half_head(model)
