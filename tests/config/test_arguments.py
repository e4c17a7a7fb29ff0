"""KEY=VALUE arguments become a dataclass, or an error that names every wrong argument."""

from dataclasses import dataclass

import pytest

from rltrain.common.errors import ConfigError
from rltrain.config.schema.arguments import listed, read_arguments, required
from rltrain.config.schema.fields import key


@dataclass
class Settings:
    model: list[str] = required("one or more models")
    port: int | None = key(None, least=1, most=65535)
    share: float = key(0.5, over=0, most=1)
    dtype: str = key("auto", among=("auto", "float32"))
    bounds: list[int | None] = key([], least=1)
    quiet: bool = False


def test_arguments_have_the_types_of_their_fields():
    words = ["model=a,b", "port=80", "share=1", "bounds=[4,none]", "quiet=True", "port=null", "dtype=float32"]
    assert read_arguments(Settings, words) == Settings(["a", "b"], None, 1.0, "float32", [4, None], True)
    assert read_arguments(Settings, ["model=x"]) == Settings(["x"])


def test_all_problems_are_reported_at_once():
    words = ["prot=1", "x", "port=0", "share=nan", "dtype=int8", "bounds=x", "quiet=maybe"]
    with pytest.raises(ConfigError) as error:
        read_arguments(Settings, words, where="--set", problems=["an earlier problem."])
    assert str(error.value).splitlines() == [
        "an earlier problem.",
        "--set prot=1: unknown key prot. Did you mean port=?",
        "--set x: not of the form KEY=VALUE. Known are model, port, share, dtype, bounds, quiet.",
        "--set port=0: it must be between 1 and 65535.",
        "--set share=nan: it must be finite.",
        "--set dtype=int8: use one of auto, float32.",
        "--set bounds=x: 'x' is not a whole number or null.",
        "--set quiet=maybe: expected true or false.",
        "--set model= is not given: one or more models.",
    ]


def test_other_arguments_are_passed_on_unless_they_look_misspelt():
    others = []
    assert read_arguments(Settings, ["model=x", "data.seed=1", "+y=2", "flag"], others=others) == Settings(["x"])
    assert others == ["data.seed=1", "+y=2", "flag"]
    with pytest.raises(ConfigError, match=r"modle=x: unknown key modle\. Did you mean model=\?"):
        read_arguments(Settings, ["model=x", "modle=x"], others=[])
    read_arguments(Settings, ["model=x", "modle=x"], others=others, elsewhere=["modle"])
    assert others[-1] == "modle=x"
    with pytest.raises(ConfigError, match=r"Did you mean mode=\?"):
        read_arguments(Settings, ["model=x", "modee=x"], others=[], elsewhere=["mode"])


def test_an_empty_required_argument_counts_as_missing():
    with pytest.raises(ConfigError, match=r"model= is not given: one or more models\.\nUse a folder\.$"):
        read_arguments(Settings, ["model="], hint="Use a folder.")


def test_an_existing_path_may_have_commas(tmp_path):
    (tmp_path / "a,b").touch()
    assert listed(str(tmp_path / "a,b")) == [str(tmp_path / "a,b")]
    assert listed("'a', b,") == ["a", "b"]
