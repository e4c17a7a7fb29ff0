"""Rows for multi-turn runs: their requirements of tools and environments, which must accept the rows."""

import json

import pytest

from rltrain.agents.ready.calculator import calculator
from rltrain.agents.ready.frozen_lake import FrozenLake
from rltrain.agents.ready.guess import Guess
from rltrain.common.errors import DataError
from rltrain.data.rows import read_rows
from rltrain.data_preprocess import arithmetic, frozen_lake, gsm8k, guess_number, retool, search_r1
from rltrain.rewards.scorers.registry import find_scorer


def converted(module, folder, record, *options):
    (folder / "in.jsonl").write_text(json.dumps(record) + "\n")
    assert module.main(["--input", str(folder / "in.jsonl"), "--output", str(folder / "out"), *options]) == 0
    return next(iter(folder.glob("out/*.parquet")))


def generated(module, folder, *options):
    assert module.main(["--output", str(folder), *options]) == 0
    return {split: list(read_rows(str(folder / f"{split}.parquet"))) for split in ("train", "test")}


def as_row(one):
    """Return the row as an environment's `reset` gets it."""
    return {"data_source": one.data_source, "extra_info": one.extra_info, "ground_truth": one.ground_truth}


GSM = {"question": "Anna has 3 apples and buys 4.", "answer": "3+4=<<3+4=7>>7\n#### 7"}


def test_gsm8k_with_a_tool_says_so_and_holds_no_answer_for_it(tmp_path):
    file = converted(gsm8k, tmp_path, GSM, "--tool", "calculator")
    assert list(read_rows(str(file))[0].extra_info) == ["split", "index", "question", "answer"]
    import pyarrow.parquet as pq

    (record,) = pq.read_table(file).to_pylist()
    assert record["agent_name"] == "tool_agent"
    assert record["data_source"] == "openai/gsm8k"
    assert record["prompt"][0]["content"].endswith("Calculate with the tool calculator.")
    (plain,) = pq.read_table(converted(gsm8k, tmp_path, GSM)).to_pylist()
    assert "agent_name" not in plain
    assert record["prompt"][0]["content"].startswith(plain["prompt"][0]["content"])


def test_gsm8k_for_the_tool_of_verl_has_its_arguments(tmp_path):
    (row,) = read_rows(str(converted(gsm8k, tmp_path, GSM, "--tool", "calc_gsm8k_reward")))
    assert row.extra_info["need_tools_kwargs"] is True
    assert row.extra_info["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "7"}}}


@pytest.mark.parametrize(
    "record",
    [
        {"id": "train_0", "question": "who wrote it", "golden_answers": ["A. B.", "C"], "data_source": "nq"},
        {"question": "who wrote it ?", "reward_model": {"style": "rule", "ground_truth": {"target": ["A. B.", "C"]}}},
        {"question": "who wrote it?", "golden_answers": ["A. B.", "C"], "data_source": "searchR1_nq"},
    ],
)
def test_questions_of_search_r1_are_scored_by_their_answer_tags(tmp_path, record):
    (row,) = read_rows(str(converted(search_r1, tmp_path, record)))
    assert row.data_source == "searchR1_nq"
    assert list(row.ground_truth) == ["A. B.", "C"]
    assert row.prompt[0]["content"].startswith(record["question"].rstrip("?"))
    assert row.prompt[0]["content"].count("?") == 1
    score = find_scorer(row.data_source)
    for answer, right in {"<answer>a b</answer>": 1.0, "<answer> C. </answer>": 1.0, "C": 0.0, "<answer>": 0.0}.items():
        assert score(answer, row.ground_truth, row.extra_info)["score"] == right


def test_sets_of_retool_ask_for_a_box_and_reward_calls(tmp_path):
    dapo = {
        "prompt": [{"role": "user", "content": "What is 5? Answer: $Answer"}],
        "reward_model": {"ground_truth": "34", "style": "rule"},
        "extra_info": {"index": "a"},
    }
    aime = {"problem": "Aya walks.", "answer": "073"}
    for name, record, source in (("dapo_math_17k", dapo, "retool/math_dapo"), ("aime25", aime, "retool/aime25")):
        folder = tmp_path / name
        folder.mkdir()
        (row,) = read_rows(str(converted(retool, folder, record, "--dataset", name)))
        assert row.data_source == source
        assert row.prompt[-1]["content"].endswith("Put the final answer in \\boxed{}.")
        score, right = find_scorer(source), f"so \\boxed{{{row.ground_truth}}}."
        assert score(right, row.ground_truth, row.extra_info)["score"] == 1.0
        for num_turns, loss in {2: -1.0, 4: -0.9, 10: -0.6, 40: -0.6}.items():
            extra = row.extra_info | {"num_turns": num_turns}
            assert score("\\boxed{1}", row.ground_truth, extra)["score"] == pytest.approx(loss)
            assert score(right, row.ground_truth, extra)["score"] == 1.0


def test_numbers_to_guess_come_equally_often_and_are_found(tmp_path):
    rows = generated(guess_number, tmp_path, "--num-train", "62", "--num-test", "5", "--high", "31")
    numbers = [row.extra_info["number"] for row in rows["train"]]
    assert sorted(numbers) == sorted([*range(1, 32)] * 2)
    assert numbers[:31] != numbers[31:]
    assert [row.extra_info["number"] for row in rows["test"]] == [1, 7, 13, 19, 25]
    for row in rows["train"][:5]:
        game = Guess()
        game.reset(as_row(row), 0)
        assert game.step(row.ground_truth) == ("correct", 1.0, True)
        assert row.prompt[0]["content"] == "Guess my number from 1 to 31."
        assert find_scorer(row.data_source)(row.ground_truth, row.ground_truth, row.extra_info) == 1.0
    with pytest.raises(DataError, match="--low 2 is above"):
        guess_number.generate(1, 1, seed=0, low=2, high=1)


def test_lakes_can_be_crossed_and_those_of_test_are_new(tmp_path):
    rows = generated(frozen_lake, tmp_path, "--num-train", "30", "--num-test", "10", "--sizes", "4", "5")
    seen = {split: {tuple(row.extra_info["make"]["desc"]) for row in rows[split]} for split in rows}
    assert (len(seen["train"]), len(seen["test"])) == (30, 10)
    assert not seen["train"] & seen["test"]
    assert {len(lake) for lake in seen["train"]} == {4, 5}
    for row in rows["train"] + rows["test"]:
        lake = FrozenLake()
        assert row.prompt[0]["content"].endswith(lake.first(as_row(row)))
        lake.reset(as_row(row), 0)
        *_, (_, reward, done) = [lake.step(move) for move in row.ground_truth.split()]
        assert (reward, done) == (1.0, True)
        score = find_scorer(row.data_source)
        for answer, right in {row.ground_truth: 1.0, "": 0.0, "left " * 2000: 0.0}.items():
            assert score(answer, row.ground_truth, row.extra_info) == right


def test_a_hole_ends_a_way_as_in_the_environment():
    extra = {"make": {"desc": ["SFF", "FHF", "FFG"]}}
    for moves, right in {"right down up right": 0.0, "Right, RIGHT; down down": 1.0, "downright": 0.0}.items():
        lake, done = FrozenLake(), False
        lake.reset({"extra_info": extra}, 0)
        for move in moves.lower().replace(",", " ").replace(";", " ").split():
            done = done or lake.step(move)[2]
        assert find_scorer("rltrain/frozen_lake")(moves, "", extra) == lake.score()["score"] == right


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sizes", "2", "--num-test", "50"], "too few maps for 50"),
        (["--ice", "0.1"], "--ice must be 0.6 to 1"),
        (["--sizes", "99"], "--sizes 2 to 16"),
    ],
)
def test_lakes_that_are_not_there_are_refused(tmp_path, capsys, options, words):
    assert frozen_lake.main([*options, "--output", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_products_for_the_calculator_are_what_it_says(tmp_path):
    operands = ["--min-operand", "100", "--max-operand", "999", "--operators", "*"]
    rows = generated(arithmetic, tmp_path, *operands, "--num-train", "50", "--num-test", "9")
    for row in rows["train"] + rows["test"]:
        problem = row.prompt[0]["content"].removesuffix("=?")
        assert all(100 <= int(number) <= 999 for number in problem.split("*"))
        assert calculator(problem) == row.ground_truth
    with pytest.raises(DataError, match="--min-operand 10 is not between 0 and --max-operand 9"):
        arithmetic.generate(1, 1, seed=0, min_operand=10, max_operand=9, operators="*")
