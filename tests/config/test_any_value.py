"""Any value of any key is accepted, or an error names the key."""

import pytest

from rltrain.api import check_settings
from rltrain.common.errors import ConfigError
from rltrain.config.load import load_config
from rltrain.config.notes import other_meanings
from rltrain.config.schema.keys import all_keys, plugin_keys
from rltrain.main_ppo import main

BASE = ["actor_rollout_ref.model.path=m", "data.train_files=t.parquet", "trainer.n_gpus_per_node=8"]
ENGINES = "actor_rollout_ref.rollout.engine_kwargs"


def problems(words: list[str]) -> str:
    try:
        loaded = load_config([*BASE, *words])
        check_settings(loaded)
        list(other_meanings(loaded))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.few(4)
@pytest.mark.parametrize("value", ["null", "word", "3", "-7.5", "[a,1]", "[]", "{a:1}", "[[1],{a:2}]", "{a:{b:[1]}}"])
def test_any_value_of_any_key_is_taken_or_refused_by_name(value):
    """Tests all keys together, and then only the keys that accept the value, so that every rule sees it."""
    words = {f"{key}={value}" for key in all_keys()}
    told = problems(sorted(words))
    taken = sorted(word for word in words if f"{word.partition('=')[0]}" not in told)
    problems(taken)
    problems([word for word in taken if word.partition("=")[0] not in plugin_keys()])


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
@pytest.mark.parametrize("given", ["flashinfer", "3", "[1]", "True"])
def test_a_word_for_the_arguments_of_an_engine_is_a_sentence(engine, given, capsys):
    for chosen in ("hf", "vllm"):
        words = [f"{ENGINES}.{engine}={given}", f"actor_rollout_ref.rollout.name={chosen}", "--dry-run"]
        assert main([*BASE, *words]) == 2
        assert f"{ENGINES}.{engine}" in capsys.readouterr().err
