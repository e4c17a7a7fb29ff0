"""The table of verl's keys (rltrain/config/verl/keys.tsv): all rows are used and refer to existing keys."""

import math
import re
from pathlib import Path

import pytest

from rltrain.common.errors import ConfigError
from rltrain.config.load import load_config
from rltrain.config.schema.keys import all_keys, free_form_parent, is_known, sections
from rltrain.config.verl.keys import aliases, classes, refused_null, rename, verdict
from rltrain.config.verl.table import keys_of_verl, rows, sentence
from tests.config.commands import A, problems, words

# Null has a special meaning here, which the help text explains.
OWN_NULL = {"trainer.max_actor_ckpt_to_keep", "trainer.hang_floor_s", "trainer.save_every_s"} | {
    "actor_rollout_ref.rollout.multi_turn.trajectory_timeout_s"
}
# The keys that most published verl scripts set, each with a value from them.
PUBLISHED = [line for line in Path(__file__).with_name("verl_keys.txt").read_text().splitlines() if line]


def test_the_keys_of_published_scripts_are_accepted_or_answered_with_what_to_use():
    for override in PUBLISHED:
        answered = any(part in override for part in ("megatron.", "data_parallel_size="))
        # equal to the value without the backend
        if answered and not override.endswith(("parallel_size=1", "=False", "=null")):
            with pytest.raises(ConfigError, match=r"[Uu]se|leave|single-turn") as caught:
                load_config([override])
            assert "unknown key" not in str(caught.value)
        else:
            load_config([override, f"+{override}"])


def test_null_is_the_default_of_every_key():
    keys = [key for key in all_keys() if key not in OWN_NULL and not refused_null(key)]
    declared = {key: all_keys()[key].default for key in keys}
    told = [key for key in keys if declared[key] and not str(declared[key]).startswith("${")]
    for word, how in (("{}=null", "is"), ("{}=", "is empty, so it is"), ("~{}", "")):
        loaded = load_config([word.format(key) for key in keys])
        assert loaded.config == load_config([]).config
        assert sorted(loaded.warnings) == sorted(
            f"{word.format(key)} {how} {declared[key]}, the default" for key in told if how
        )
        assert not set(keys) & set(loaded.explicit)


def test_an_estimator_that_is_null_is_refused_unless_another_word_names_one(tmp_path):
    null, file = "algorithm.adv_estimator=null", tmp_path / "sppo.yaml"
    file.write_text("algorithm: {adv_estimator: null}\n")
    for typed, files in (([null], []), (["algorithm.adv_estimator=grpo", null], []), ([], [str(file)])):
        with pytest.raises(ConfigError, match=f"^{null}: .*SPPO and SPIN.*such as gae or grpo"):
            load_config(typed, files)
    for typed in ([null, "algorithm.adv_estimator=grpo"], [null, "~algorithm.adv_estimator"]):
        assert load_config(typed, [str(file)]).warnings == ()


@pytest.mark.parametrize("off", ["null", "False", "0", "[]", "{}", "disabled", ""])
def test_what_is_turned_off_is_not_refused(off):
    refused = [row for row in rows("refused", "section") if row.condition.operator in ("", "!=")]
    keys = {row.key.replace("*@*", "a@b").replace("*", "x") for row in refused}
    assert load_config([f"{key}={off}" for key in sorted(keys)]).warnings == ()
    # An unknown key gets a note, and one that is near a key of ours is a mistake all the same.
    assert "turned off" in load_config([f"{A}actor.no_such_thing={off}"]).warnings[0]
    assert "Did you mean data.shuffle" in problems(f"data.shufle={off}")[0]


def concrete(pattern: str) -> str:
    """Return a key that a row matches."""
    return ("critic" + pattern[1:] if pattern.startswith("*.") else pattern).replace("*", "x").rstrip(".")


def test_rows_lead_to_keys_that_exist():
    targets = [*aliases().values(), *classes().values(), *(row.key for row in rows("value", "elsewhere", "differs"))]
    for key in targets:
        assert key.rstrip(".") in {*all_keys(), *sections()} or free_form_parent(key), key
    for old in (*aliases(), *(row.key for row in rows("translated", "path", "name", "no effect"))):
        assert old.rstrip(".") not in all_keys(), f"{old} is a key of ours"
    for row in rows("turns on"):
        assert {f"{A}actor.{row.key.split('.')[1]}.{name}" for name in row.to.split()} <= set(all_keys())
    assert not [section for section in sections() if verdict(section, "x")]


def test_sentences_of_rows_name_keys_that_exist():
    named = re.compile(r"(?:--help )?(?<![\w{}.])(?:[a-z]\w*\.)+\w+(?==|\b)")
    key_names = [*all_keys(), *sections(), *aliases(), *(row.key for row in rows("no effect", "refused"))]
    for why in {row.note for row in rows("no effect", "refused", "section")}:
        for name in named.findall(re.sub(r"\w+\.jsonl?\b", "", why)):
            key = name.removeprefix("--help ")
            assert any(f".{key_name}".endswith(f".{key}") for key_name in key_names), (key, why)


def test_no_key_of_verl_is_called_unknown():
    for key, row in keys_of_verl().items():
        ruling = verdict(rename(key), "x")
        assert is_known(rename(key)) or not ruling or ruling.why != sentence("unknown"), (key, row.verl)
    unknown = [key for key in keys_of_verl() if not verdict(rename(key), "x") and not is_known(rename(key))]
    lines = problems(*(f"{key}=word" for key in unknown if not is_known(f"{rename(key)}_per_gpu")))
    assert not [line for line in lines if line.startswith("unknown key")]


def test_every_row_of_the_tables_is_reached():
    for row in rows("refused", "section", "no effect"):
        operator, values = row.condition.operator, row.condition.values
        wanted = values[0] if operator == "=" else {">": math.inf, "<": -math.inf}.get(operator, "something")
        key = concrete(row.key)
        if row.action == "section" and row.to:
            key = key.removesuffix("x") + row.to
        ruling = verdict(key, wanted if wanted != "null" else None)
        assert (ruling and ruling.row, ruling and ruling.applies) == (row, True)


@pytest.mark.parametrize(
    "key",
    [
        "reward_model.rollout.nobody_s", "model.lora.nobody_s", "nobody_s.profiler.enable", "trainer.nccl_timeout",
        "algorithm.optim.lr_scheduler", "rewards.reward_kwargs.x",
    ],
)  # fmt: skip
def test_a_name_that_verl_does_not_know_is_refused_in_its_sections_too(key):
    assert problems(f"{key}=1")[0].startswith(f"unknown key '{words(key)[0]}'")
