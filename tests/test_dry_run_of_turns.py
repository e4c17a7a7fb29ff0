"""``--dry-run`` of a command with tools or an environment: rows, lengths, and the chat template after a turn."""

import pytest

from rltrain.data import chat
from rltrain.main_ppo import main
from tests.tiny import small_run, write_arithmetic
from tests.tiny_tools import TEMPLATE, save_calling_model, tool_run

R = "actor_rollout_ref__rollout__multi_turn__"
GUESS = """
class Guess:
    def __init__(self, most=10):
        self.most = most

    def step(self, text):
        return "higher", 0.0, False
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_calling_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def dry(model, tmp_path, capsys, monkeypatch):
    """Run it with changes; return exit code and text."""
    monkeypatch.setattr(chat, "problem_in_fork", lambda *_: "")
    files = (
        write_arithmetic(tmp_path / "train.parquet", range(8)),
        write_arithmetic(tmp_path / "val.parquet", range(4)),
    )
    (tmp_path / "guess.py").write_text(GUESS)
    tools = tool_run(model, tmp_path)

    def run(**changes):
        code = main([*small_run(model, files, tmp_path / "run", **tools | changes), "--dry-run"])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_an_environment_needs_no_format_of_calls(dry, tmp_path):
    place = {R + "environment": f"{tmp_path}/guess.py:Guess", R + "environment_kwargs": "{most: 31}"}
    alone = {R + "function_tool_path": "null", R + "format": "llama3_json"}
    code, text = dry(**place, **alone)
    assert code == 0, text
    assert f"of {tmp_path}/guess.py:Guess" in text
    code, text = dry(**place)
    assert code == 0, text
    assert f"of {tmp_path}/tools.py, {tmp_path}/guess.py:Guess" in text


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("</tool_response>", "</tool_response>{{ loop.index0 }}", "function_tool_path"),
        ("{{ message.role }}", "{{ message.role }}{{ messages | length }}", "environment"),
    ],
)
def test_a_template_that_cannot_go_on_is_refused_with_the_key(dry, tmp_path, old, new, key):
    (tmp_path / "own.jinja").write_text(TEMPLATE.replace(old, new))
    changes = {"actor_rollout_ref__model__custom_chat_template": tmp_path / "own.jinja"}
    if key == "environment":
        changes |= {R + "environment": f"{tmp_path}/guess.py:Guess", R + "function_tool_path": "null"}
    code, text = dry(**changes)
    assert code == 2
    assert f"multi_turn.{key}=" in text
    assert "cannot be continued after a turn: " in text


def test_a_place_that_cannot_be_loaded_is_refused_before_models(dry, tmp_path):
    for key, value, words in (
        ("function_tool_path", tmp_path / "gone.py", "gone.py is not a Python file"),
        ("tool_config_path", tmp_path / "gone.yaml", "cannot be read"),
        ("environment", f"{tmp_path}/guess.py:Gues", "no function 'Gues'"),
    ):
        code, text = dry(**{R + key: value})
        assert code == 2
        assert words in text
        assert f"multi_turn.{key}=" in text
