"""Runs with what comes along, on rows as the converters make them."""

import json

import pytest

import rltrain
from rltrain.base.errors import ConfigError
from rltrain.data_preprocess import frozen_lake, guess_number, search_r1
from tests.tiny import small_run
from tests.tiny_tools import save_calling_model, tool_run

R = "actor_rollout_ref__rollout__multi_turn__"
SEARCH = '<tool_call>\n{"name": "search", "arguments": {"query": "capital of Norway"}}\n</tool_call>'


@pytest.fixture
def run(tmp_path):
    """run(**changes): the metrics of the newest step, and the answers that were kept."""

    def start(call=SEARCH, **changes):
        tools = tool_run(save_calling_model(tmp_path / "model", call=call), tmp_path)
        del tools[R + "function_tool_path"]
        files = (tmp_path / "rows" / "train.parquet", tmp_path / "rows" / "test.parquet")
        result = rltrain.train(small_run(tmp_path / "model", files, tmp_path / "run", **tools, **changes))
        return result.newest(), rltrain.read_samples(tmp_path / "run")

    return start


def made(convert, folder, *options):
    assert convert.main(["--output", str(folder / "rows"), *options]) == 0


# What each environment does, without a run: tests/agents/ready.
@pytest.mark.long
@pytest.mark.usefixtures("joined")
def test_a_number_is_guessed(run, tmp_path):
    made(guess_number, tmp_path, "--num-train", "24", "--num-test", "4", "--high", "3")
    metrics, answers = run(**{R + "environment": "rltrain.agents.ready.guess:Guess"})
    assert metrics["num_turns/max"] > 2
    assert answers["answer"].str.contains("Say a number from 1 to 3.", regex=False).any()
    # The score is the environment's, and its numbers are kept beside it.
    assert (answers["found"] == answers["score"]).all()
    assert answers["found"].sum() > 0
    assert (answers["guesses"] <= answers["num_turns"]).all()
    assert metrics["agent/failed"] == 0


@pytest.mark.long
@pytest.mark.usefixtures("joined")
def test_a_lake_is_walked(run, tmp_path):
    made(frozen_lake, tmp_path, "--num-train", "24", "--num-test", "4", "--sizes", "3", "--instruction", "Move.")
    environment = {R + "environment": "rltrain.agents.ready.frozen_lake:FrozenLake"}
    environment[R + "environment_kwargs"] = "{max_steps: 3}"
    metrics, answers = run(**environment)
    assert metrics["num_turns/max"] > 2
    assert answers["answer"].str.contains("That is no action. Say one of left, down, right, up.", regex=False).any()
    assert metrics["agent/failed"] == 0


@pytest.mark.long
@pytest.mark.usefixtures("joined")
def test_a_corpus_is_searched(run, tmp_path):
    rows = "".join(json.dumps({"question": f"q{i}", "golden_answers": ["Oslo"]}) + "\n" for i in range(24))
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(rows)
    made(search_r1, tmp_path, "--input", str(tmp_path), "--instruction", "Search.")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "Oslo", "text": "Oslo is the capital of Norway."}))
    keys = {R + "environment": "rltrain.agents.ready.search:Search"}
    keys[R + "environment_kwargs__corpus"] = tmp_path / "corpus.jsonl"
    _, answers = run(**keys)
    called = answers[answers["tool_calls"] > 0]
    assert len(called)
    assert called["answer"].str.contains("Doc 1(Title: Oslo) Oslo is the capital of Norway.", regex=False).all()
    assert answers["tool_errors"].sum() == 0


# At every run: tests/agents/ready.
@pytest.mark.long
@pytest.mark.usefixtures("joined")
def test_a_program_is_run_where_that_was_allowed(run, tmp_path):
    made(guess_number, tmp_path, "--num-train", "24", "--num-test", "4")
    keys = {R + "function_tool_path": "rltrain.agents.ready.python", R + "allow_code_execution": True}
    _, answers = run('<tool_call>\n{"name": "python", "arguments": {"code": "6 * 7"}}\n</tool_call>', **keys)
    called = answers[answers["tool_calls"] > 0]
    assert len(called)
    assert called["answer"].str.contains("<tool_response>\n42\n</tool_response>", regex=False).all()
    with pytest.raises(ConfigError, match="allow_code_execution=True, or leave the tool out"):
        run(**keys | {R + "allow_code_execution": False, "trainer__default_local_dir": tmp_path / "other"})
