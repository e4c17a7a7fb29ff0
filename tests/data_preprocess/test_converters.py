import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.common.errors import DataError
from rltrain.data.rows import read_rows
from rltrain.data_preprocess import (
    arithmetic,
    frozen_lake,
    gsm8k,
    guess_number,
    moving_square,
    reasoning_gym,
    rectangles,
)
from rltrain.data_preprocess.common import row, write_splits
from rltrain.rewards.scorers.registry import find_scorer

ROOT = Path(__file__).parents[2]


def load(folder, split):
    return list(read_rows(str(folder / f"{split}.parquet")))


def question(one):
    return one.prompt[-1]["content"]


def swapped(text):
    left, _, right = text.removesuffix("=?").partition("+")
    return f"{right}+{left}=?"


def test_arithmetic_truths_are_right_and_score_one(tmp_path):
    options = f"--num-train 60 --num-test 20 --operators +-* --max-operand 30 --output {tmp_path}"
    assert arithmetic.main(options.split()) == 0
    rows = load(tmp_path, "train") + load(tmp_path, "test")
    assert len(rows) == 80
    assert {operator for one in rows for operator in "+-*" if operator in question(one)} == set("+-*")
    for one in rows:
        assert one.ground_truth == str(eval(question(one).removesuffix("=?")))
        assert find_scorer(one.data_source)(one.ground_truth, one.ground_truth, one.extra_info) == 1.0


@pytest.mark.parametrize(("max_operand", "num_train", "num_test"), [(9, 300, 20), (99, 500, 100), (10**9, 50, 10)])
def test_held_out_arithmetic_is_not_in_train_not_even_swapped(max_operand, num_train, num_test):
    splits = arithmetic.generate(num_train, num_test, seed=3, max_operand=max_operand, operators="+")
    train, test = ([one["prompt"][0]["content"] for one in splits[split]] for split in ("train", "test"))
    assert (len(train), len(test), len(set(test))) == (num_train, num_test, num_test)
    assert not set(test) & set(train)
    assert not {swapped(text) for text in test} & (set(train) | {t for t in test if swapped(t) != t})
    num_possible = (max_operand + 1) ** 2 - len({*test, *map(swapped, test)})
    assert len(set(train)) == min(num_train, num_possible)


def test_small_problem_spaces_repeat_train_and_refuse_test(capsys):
    splits = arithmetic.generate(100, 2, seed=0, max_operand=2, operators="+")
    texts = [one["prompt"][0]["content"] for one in splits["train"]]
    assert len(texts) == 100
    assert len(set(texts)) >= 5
    assert len(set(texts)) == len(set(texts[: len(set(texts))]))  # every text occurs once before any occurs twice
    assert arithmetic.main(["--max-operand", "1", "--num-test", "50", "--output", "/nowhere"]) == 2
    assert "--max-operand 1" in capsys.readouterr().err
    assert arithmetic.main(["--operators", "+/", "--output", "/nowhere"]) == 2
    assert "division" in capsys.readouterr().err


def test_files_go_below_the_current_folder_and_a_refused_write_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--num-train", "4", "--num-test", "2"]
    assert arithmetic.main(options) == 0
    assert sorted(file.name for file in (tmp_path / "data" / "arithmetic").iterdir()) == [
        "test.parquet",
        "train.parquet",
    ]
    capsys.readouterr()
    (tmp_path / "file").write_text("")
    assert arithmetic.main([*options, "--output", str(tmp_path / "file" / "here")]) == 74
    (line,) = capsys.readouterr().err.splitlines()
    assert "train.parquet cannot be written" in line


@pytest.mark.parametrize("module", [arithmetic, frozen_lake, guess_number, moving_square, rectangles])
def test_options_decide_the_bytes_and_the_seed_the_rows(tmp_path, module):
    for folder, seed in (("a", 0), ("b", 0), ("c", 1), ("a", 0)):
        options = ["--num-train", "40", "--num-test", "8", "--seed", str(seed), "--output", str(tmp_path / folder)]
        assert module.main(options) == 0
    one, two, other = ((tmp_path / folder / "train.parquet").read_bytes() for folder in "abc")
    assert one == two
    assert one != other
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["test.parquet", "train.parquet"]


def test_pages_carry_checksums_and_a_sample_is_shown(tmp_path, capsys):
    assert arithmetic.main(["--num-train", "40", "--num-test", "8", "--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "train: 40 rows" in shown
    assert "test: 8 rows" in shown
    assert '"data_source": "rltrain/arithmetic"' in shown
    path = tmp_path / "train.parquet"
    whole = bytearray(path.read_bytes())
    at = whole.find(b"=?")
    whole[at] ^= 1
    path.write_bytes(whole)
    with pytest.raises(DataError):
        read_rows(str(path))


def test_a_row_that_training_would_refuse_is_never_written(tmp_path):
    with pytest.raises(DataError, match="data_source"):
        write_splits(tmp_path, {"train": [row("", "q", "1", ability="math", split="train", index=0)]})
    mixed = [row("a", "q", "1", ability="math", split="train", index=0, extra={"x": x}) for x in ("text", [1])]
    with pytest.raises(DataError, match="extra_info"):
        write_splits(tmp_path, {"train": mixed})
    assert list(tmp_path.iterdir()) == []


GSM8K = [
    {"question": "Natalia sold 48 and then half. How many?", "answer": "48/2 = <<48/2=24>>24\n#### 72"},
    {"question": "A car costs $1,234?", "answer": "It is.\n#### $1,234"},
]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def check_gsm8k(folder):
    rows = load(folder, "train")
    assert [one.ground_truth for one in rows] == ["72", "1234"]
    assert question(rows[0]) == GSM8K[0]["question"] + " " + gsm8k.INSTRUCTION
    assert rows[0].extra_info == {"split": "train", "index": 0, **GSM8K[0]}
    for one in rows:
        assert find_scorer(one.data_source)("so\n#### " + one.ground_truth, one.ground_truth, {})["score"] == 1
    assert len(load(folder, "test")) == 1


def test_gsm8k_from_files_and_the_hub_s_folders(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", GSM8K)
    write_jsonl(tmp_path / "test.jsonl", GSM8K[:1])
    (tmp_path / "hub" / "main").mkdir(parents=True)
    for split, part in (("train", GSM8K), ("test", GSM8K[:1])):  # as on the hub
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "hub" / "main" / f"{split}-00000-of-00001.parquet")
    for folder in (tmp_path, tmp_path / "hub"):
        assert gsm8k.main(["--input", str(folder), "--output", str(tmp_path / "out")]) == 0
        check_gsm8k(tmp_path / "out")
    files = ["--input", str(tmp_path / "train.jsonl"), "--test-input", str(tmp_path / "test.jsonl")]
    assert gsm8k.main([*files, "--output", str(tmp_path / "two")]) == 0
    check_gsm8k(tmp_path / "two")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"question": "q", "answer": "no number"}, "row 1: field 'answer' has no number after '####'"),
        ("text", "row 1: fields 'question' and 'answer' must be text"),
    ],
)
def test_a_bad_gsm8k_row_is_named(tmp_path, capsys, record, said):
    write_jsonl(tmp_path / "train.jsonl", [GSM8K[0], record])
    assert gsm8k.main(["--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


def test_missing_or_broken_gsm8k_input_says_what_to_give(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    output = ["--output", str(tmp_path / "out")]
    assert gsm8k.main(output) == 2
    assert "pip install datasets" in capsys.readouterr().err
    assert gsm8k.main(["--input", str(tmp_path), *output]) == 2
    assert "train.jsonl and test.jsonl" in capsys.readouterr().err
    (tmp_path / "train.jsonl").write_text("{broken")
    assert gsm8k.main(["--input", str(tmp_path), *output]) == 2
    assert "cannot be read as json: line 1 is not complete JSON (" in capsys.readouterr().err


def test_reasoning_gym_rows_score_one_with_their_answer(tmp_path):
    pytest.importorskip("reasoning_gym")
    options = ["--task", "basic_arithmetic", "--num-train", "12", "--num-test", "5", "--output", str(tmp_path)]
    assert reasoning_gym.main(options) == 0
    rows = load(tmp_path, "train") + load(tmp_path, "test")
    assert len({question(one) for one in rows}) == 17
    for one in rows:
        assert one.data_source == "reasoning_gym/basic_arithmetic"
        scorer = find_scorer(one.data_source)
        assert scorer(f"<answer>{one.ground_truth}</answer>", one.ground_truth, one.extra_info) == 1.0
        assert scorer("<answer>x</answer>", one.ground_truth, one.extra_info) < 0.1


def test_reasoning_gym_streams_do_not_overlap():
    pytest.importorskip("reasoning_gym")
    splits = {seed: reasoning_gym.generate("chain_sum", 200, 20, seed=seed) for seed in (0, 1)}
    sets = {
        (seed, name): {one["prompt"][0]["content"] for one in part}
        for seed in splits
        for name, part in splits[seed].items()
    }
    assert not sets[0, "train"] & sets[0, "test"]
    assert len(sets[0, "train"] & sets[1, "train"]) < 20


def test_reasoning_gym_mistakes_are_named(capsys, tmp_path):
    pytest.importorskip("reasoning_gym")
    output = ["--num-train", "4", "--num-test", "2", "--output", str(tmp_path)]
    for options, said in (
        ("no_such_task", "no task 'no_such_task'"),
        ("countdown", "runs the answer as Python code"),
        ("sentence_reordering --as-gsm8k", "--as-gsm8k needs numeric answers"),
    ):
        assert reasoning_gym.main(["--task", *options.split(), *output]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.few(1)
def test_converters_run_as_files_from_the_repository_root(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", GSM8K)
    command = [sys.executable, "data_preprocess/gsm8k.py", "--input", str(tmp_path), "--output", str(tmp_path / "out")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert load(tmp_path / "out", "train")


def test_reasoning_gym_shows_a_worked_example_and_sets_the_task(tmp_path):
    from rltrain.data_preprocess.reasoning_gym import WORKED_EXAMPLE, generate

    how = {"seed": 0, "as_gsm8k": True, "settings": {"min_terms": 2, "max_terms": 2}}
    made, plain = (generate("chain_sum", 4, 2, worked_example=shown, **how) for shown in (True, False))
    for each in (*made["train"], *made["test"]):
        assert each["prompt"][:2] == WORKED_EXAMPLE
        assert len(each["prompt"]) == 3
        assert each["data_source"] == "openai/gsm8k"
        assert each["prompt"][2]["content"].endswith(gsm8k.INSTRUCTION)
        assert each["extra_info"]["question"].count(" + ") + each["extra_info"]["question"].count(" - ") == 1
    assert [each["prompt"][2:] for each in made["train"]] == [each["prompt"] for each in plain["train"]]
