"""The table of engines, and the only place that creates them."""

import importlib

import pytest
from transformers import Qwen3Config

from rltrain.config.schema.engines import ENGINES, Engine
from rltrain.workers.rollout.contract import RolloutEngine
from rltrain.workers.rollout.settings import make_engine
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
