"""Arguments and file contents are accepted completely, or refused."""

import pytest

from rltrain.common.errors import ConfigError
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.schema.keys import all_keys, get
from tests.config.commands import BASE, A

NAME = "trainer.experiment_name"
GRADIENT_CHECKPOINTING = f"{A}model.enable_gradient_checkpointing"


def value(key: str, word: str):
    loaded = load_config([*BASE, f"{key}={word}"])
    check(loaded)
    return get(loaded.config, key)


def refused(*words: str, files: tuple = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        check(load_config([*BASE, *words], files))
    return str(caught.value)


WHOLE = [
    *("grpo #1", "#1", "a#b", "a: b", "a:b", "- x", "&x", "*x", "!tag", "!!int 5", "%x", "@x", "`x", "|", "> x", "? x"),
    *("None", "on", "no", "True", "2026-01-01", "1_000", "0x10", "0b1", "1e400", ".inf", "1:20", "007", "1.10", "---"),
    *("<<", "=", "-x", "a/b", "a, b", "it's", 'say "hi"', "...", "a\\b", "é😀"),
]


@pytest.mark.parametrize("name", WHOLE)
def test_a_name_is_taken_whole(name):
    assert value(NAME, name) == name
    assert value("data.train_files", name) == name


@pytest.mark.parametrize(
    "name",
    ["{a}", "{}", "{a: 1}", "[a]", "[]", "[a", '"', "'a' #1", "a ", " a", "a\nb", "a\tb", "\x01", "\udcff", "..", ".",
     "../x", "a/./b", "x" * 256],
)  # fmt: skip
def test_a_name_that_is_no_folder_of_its_own_is_refused(name):
    assert refused(f"{NAME}={name}").startswith(NAME)


def test_a_chat_template_may_begin_with_braces():
    template = "{% for m in messages %}{{ m['content'] }}  # {% endfor %}\n"
    assert value(f"{A}model.custom_chat_template", template) == template


@pytest.mark.parametrize(
    ("word", "number"),
    [("064", 64), ("010", 10), ("008", 8), ("+5", 5), ("1_000", 1000), ("'7'", 7), (" 7 ", 7), ("-3", -3)],
)
def test_whole_numbers_are_decimal(word, number):
    assert value("data.seed", word) == number


@pytest.mark.parametrize(
    "word",
    ["1:20", "1:20:30", "0x10", "0b1", "0o17", "1e3", "1.0", "1,000", "1 000", "5 #x", "[064]", "{a: 010}", "yes",
     "inf", "1e400", "9" * 5000],
)  # fmt: skip
def test_what_is_no_decimal_number_is_refused(word):
    assert refused(f"data.seed={word}").startswith("data.seed=")


def test_numbers_in_free_form_keys_are_decimal():
    assert value("reward.weights", "{acc: 1, format: 0.5}") == {"acc": 1, "format": 0.5}
    assert load_config(["reward.weights.acc=010"]).config.reward.weights == {"acc": 10}
    for word in ("1:20", "0x10", "yes", ".inf", "1e400", "-.inf", ".nan"):
        assert "give a number" in refused(f"reward.weights.acc={word}")
    assert "octal" in refused("reward.weights={acc: 010}")


def test_a_frequency_is_a_number_or_the_word_epoch(tmp_path):
    assert [value("trainer.save_freq", word) for word in ("20", "epoch", "false")] == [20, "epoch", -1]
    (file := tmp_path / "c.yaml").write_text("trainer: {save_freq: '20'}")
    assert load_config(BASE, [str(file)]).config.trainer.save_freq == 20
    for word in ("epochs", "2.5", "True"):
        assert refused(f"trainer.test_freq={word}").startswith(f"trainer.test_freq={word}: ")


NUMBERS = [key.name for key in all_keys().values() if key.type_name.startswith("float")]


@pytest.mark.parametrize("word", ["inf", "-inf", ".inf", "nan", ".nan", "1e400", "Infinity"])
def test_no_number_is_infinite(word):
    lines = refused(*(f"{key}={word}" for key in NUMBERS), f"algorithm.gdpo_reward_weights=[{word}]").splitlines()
    assert [key for key in NUMBERS if not any(line.startswith(f"{key}=") for line in lines)] == []
    assert any(line.startswith("algorithm.gdpo_reward_weights=") for line in lines)


SWITCHES = [key.name for key in all_keys().values() if key.type_name == "bool"]


@pytest.mark.parametrize("word", ["6", "-1", "2", "0.5", "1.0", "64", "t", "enable", "[true]", "'5'", "inf", "true #x"])
def test_a_switch_takes_nothing_but_true_and_false(word, tmp_path):
    lines = refused(*(f"{key}={word}" for key in SWITCHES)).splitlines()
    assert [key for key in SWITCHES if not any(line.startswith(f"{key}=") for line in lines)] == []
    # In a file, a comment follows this sign.
    if "#" not in word:
        file = tmp_path / "c.yaml"
        file.write_text(f"{SWITCHES[0]}: {word}\n")
        assert SWITCHES[0] in refused(files=(str(file),))


@pytest.mark.parametrize(
    ("word", "on"), [("true", True), ("FALSE", False), ("yes", True), ("no", False), ("on", True), ("0", False)]
)
def test_words_of_a_switch(word, on):
    assert value(GRADIENT_CHECKPOINTING, word) is on
    assert value(f"{A}actor.use_kl_loss", word) is on


@pytest.mark.parametrize(("word", "layers"), [("6", 6), ("'6'", 6), ("selective", "selective"), ("1", True)])
def test_words_of_recomputed_layers(word, layers):
    found = value(GRADIENT_CHECKPOINTING, word)
    assert (type(found), found) == (type(layers), layers)
    assert all(GRADIENT_CHECKPOINTING in refused(f"{GRADIENT_CHECKPOINTING}={word}") for word in ("2.5", "[2]"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data:\n  train_batch_size: 064\n", "line 2: 064 is octal in YAML"),
        ("data.train_batch_size: 1:20\n", "line 1: 1:20 is of base sixty in YAML"),
        ("trainer.experiment_name: 007\n", "line 1: 007 is octal in YAML"),
        ("trainer.experiment_name: 1.10\n", "experiment_name=1.1: expected a text: put it in quotes"),
        ("trainer.experiment_name: {a}\n", "experiment_name={'a': None}: expected a text"),
    ],
)
def test_a_file_says_where_yaml_reads_something_else(text, said, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert said in refused(files=(str(file),))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model=Qwen/x", "Did you mean actor_rollout_ref.model.path?"),
        ("bf16x=1", "unknown key 'bf16x'. See --help."),
        ("push_to_hub=True", "run `hf upload NAME FOLDER` with the exported folder"),
        ("trainer.hub_model_id=x", "run `hf upload NAME FOLDER` with the exported folder"),
        ("trainer.wandb.group=x", "WANDB_RUN_GROUP, WANDB_TAGS, WANDB_NOTES"),
        ("data.curriculum.curriculum_class=x", "an old name of data.sampler.class_path"),
        ("bf16=True", "actor_rollout_ref.actor.fsdp_config.compute_dtype"),
        ("trainer.gradient_accumulation_steps=2", "set actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("mine.yaml", "Did you mean --config mine.yaml?"),
    ],
)
def test_words_of_other_programs_are_answered_with_the_way_here(word, said):
    assert said in refused(word)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "a = 1\n", "a.toml: TOML is not supported"),
        ("a.sh", "true\n", "rltrain port translates launch scripts of verl"),
        ("none.yaml", None, "none.yaml: there is no such file"),
        ("a.yaml", "a: [1\n", "a.yaml is not valid YAML"),
        ("a.yaml", "defaults: [mine, _self_]\n", "there is no mine.yaml"),
    ],
)
def test_an_unreadable_file_is_an_error_without_its_consequences(name, text, said, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"unknown key 'x\.y'") as caught:
        load_config(["x.y=1"], [str(tmp_path / name)])
    assert said in str(caught.value)
    assert "is not set" not in str(caught.value)
