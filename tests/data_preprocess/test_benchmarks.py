"""Benchmark converters, on made-up records with the original columns."""

import base64
import importlib
import random

import pytest

from rltrain.data.rows import read_rows
from rltrain.data_preprocess import dynamath
from rltrain.data_preprocess.benchmark import BY_RULE, BY_RULE_FOR_JUDGE
from rltrain.rewards.scorers.registry import FORMS, find_scorer
from tests.data_preprocess.test_datasets import AIME24, write
from tests.images import RED

PICTURE = {"bytes": RED, "path": "a.png"}
GPQA = {
    "Question": "Which planet is red?\n",
    "Correct Answer": "Mars\n",
    "Incorrect Answer 1": "Venus",
    "Incorrect Answer 2": "Earth",
    "Incorrect Answer 3": "Saturn",
    "High-level domain": "Physics",
    "Record ID": "rec1",
}
LOGICVISTA = {
    "image": PICTURE,
    "question": "Which figures (A, B, C or D) are turned?",
    "answer": "C, A",
    "skill": ["spatial", "inductive"],
    "id": "v1_0",
}
MATHVISTA = {
    "pid": "7",
    "question": "How tall is it?",
    "decoded_image": PICTURE,
    "choices": None,
    "unit": "m",
    "precision": 1.0,
    "answer": "1.5",
    "question_type": "free_form",
    "answer_type": "float",
    "metadata": {"task": "figure question answering", "split": "testmini"},
    "query": "Hint: … one decimal place …\nQuestion: How tall is it? (Unit: m)",
}
MATHVISTA_CHOICE = MATHVISTA | {
    "choices": ["3/11", "8/11"],
    "unit": None,
    "precision": None,
    "answer": "8/11",
    "question_type": "multi_choice",
    "answer_type": "text",
    "query": "Hint: … letter …\nQuestion: How much?\nChoices:\n(A) 3/11\n(B) 8/11",
}
MATHVISION = {
    "id": "4",
    "question": "Which one fits?\n<image1>",
    "options": ["A", "B", "C", "D", "E"],
    "decoded_image": PICTURE,
    "answer": "D",
    "level": 2,
    "subject": "solid geometry",
}
MATHVERSE = {
    "sample_index": "1",
    "problem_version": "Vision Only",
    "question": "",
    "image": PICTURE,
    "answer": "D",
    "question_type": "multi-choice",
    "metadata": {"split": "testmini", "source": "x", "subject": "Plane Geometry", "subfield": "Angle"},
    "query_wo": "Please directly answer …",
    "query_cot": "Please first conduct reasoning …",
    "question_for_eval": "How large is it?\nChoices:\nA:40°\nB:60°\nC:120°\nD:140°",
}
WEMATH = {
    "ID": "3",
    "split": "testmini",
    "question": "How large is it?",
    "option": "A. 3; B. 4; C. 5; D. No correct answer",
    "answer": "B",
    "image_path": PICTURE,
    "key": "2steps_multi",
}
DYNAMATH = {
    "id": "12",
    "question": "What kind of function is it? choices: (A) odd (B) even",
    "decoded_image": PICTURE,
    "ground_truth": "B",
    "answer_type": "multiple choice",
    "subject": "analytic geometry",
}
MMMU_PRO = {
    "id": "test_Art_1",
    "image": PICTURE,
    "options": "['Red', \"Green's\", 'Blue']",
    "answer": "C",
    "subject": "Art",
}

# name, record, data source, ground truth, category, answer type, choices, published scoring, last words
SETS = {
    "gpqa": (GPQA, "gpqa_diamond", None, "Physics", "choice", 4, BY_RULE, ") "),
    "logicvista": (LOGICVISTA, "logicvista", "A, C", "spatial", "choices", 0, BY_RULE_FOR_JUDGE, "are turned?"),
    "mathvista": (
        MATHVISTA, "mathvista_mini", "1.5", "figure question answering", "float", 0, BY_RULE_FOR_JUDGE, "(Unit: m)",
    ),
    "mathvision": (MATHVISION, "mathvision_mini", "D", "solid geometry", "choice", 5, BY_RULE, "<image1>"),
    "mathverse": (MATHVERSE, "mathverse_mini", "D", "Vision Only", "choice", 4, BY_RULE_FOR_JUDGE, "reasoning …"),
    "wemath": (WEMATH, "wemath_mini", "B", "2steps_multi", "choice", 4, BY_RULE, "<Answer>: <<your option>>"),
    "mmmu_pro": (MMMU_PRO, "mmmu_pro_vision", "C", "Art", "choice", 3, BY_RULE, "before answering."),
}  # fmt: skip


def convert(name, records, folder, *options, file="test.parquet"):
    """Return the rows that a converter makes of records, and its exit code."""
    given = write(folder / file, records)
    main = importlib.import_module(f"rltrain.data_preprocess.{name}").main
    code = main(["--input", str(given), "--output", str(folder / "out"), *options])
    return code, read_rows(str(folder / "out/test.parquet")) if code == 0 else None


@pytest.mark.parametrize("name", SETS)
def test_a_question_becomes_a_row_that_says_what_its_scorer_reads(tmp_path, name):
    record, source, truth, category, kind, num_choices, scored_by, ending = SETS[name]
    code, rows = convert(name, [record], tmp_path)
    (row,), told = rows, rows[0].extra_info
    assert (code, row.data_source, told["category"], told["answer_type"]) == (0, source, category, kind)
    assert truth in (None, row.ground_truth)
    assert len(told.get("choices") or []) == num_choices
    assert told["scored_by"] == scored_by
    assert told["id"]
    text = row.prompt[0]["content"]
    assert ending in text[-40:]
    pictures = [] if name == "gpqa" else [PICTURE]
    assert rows.images(0) == pictures
    assert text.count("<image>") == len(pictures)


RECORDS = [*((name, SETS[name][0]) for name in SETS), ("mathvista", MATHVISTA_CHOICE)]


@pytest.mark.parametrize(("name", "record"), RECORDS)
def test_the_truth_earns_the_full_score_from_its_own_scorer(tmp_path, name, record):
    _, rows = convert(name, [record], tmp_path)
    row, score = rows[0], find_scorer(rows[0].data_source)
    verdicts = [score(form.format(row.ground_truth), row.ground_truth, row.extra_info) for form in FORMS]
    assert max(verdict["score"] for verdict in verdicts) == 1.0
    nothing = score("I do not know.", row.ground_truth, row.extra_info)
    assert (nothing["score"], nothing["extracted"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "wording", "said"),
    [
        ("gpqa", "boxed", "letter of the right choice in \\boxed{}"),
        ("logicvista", "boxed", "all letters if several are right, in \\boxed{}"),
        ("mathvista", "boxed", "final answer in \\boxed{}. Give 1 decimals."),
        ("mathverse", "direct", "directly answer"),
        ("mmmu_pro", "direct", "given choices directly"),
    ],
)
def test_the_wording_is_a_switch(tmp_path, name, wording, said):
    _, rows = convert(name, [SETS[name][0]], tmp_path, "--prompt", wording)
    assert said in rows[0].prompt[0]["content"]
    _, published = convert(name, [SETS[name][0]], tmp_path / "published")
    assert said not in published[0].prompt[0]["content"]


def test_gpqa_choices_are_permuted_by_a_seed_that_the_row_states(tmp_path):
    records = [GPQA | {"Record ID": f"rec{number}"} for number in range(24)]
    _, rows = convert("gpqa", records, tmp_path / "a")
    draws = random.Random(0)
    for row in rows:
        told = row.extra_info
        assert told["choices"]["ABCD".index(row.ground_truth)] == "Mars"
        assert sorted(told["choices"]) == ["Earth", "Mars", "Saturn", "Venus"]
        assert f"\n{row.ground_truth}) Mars" in row.prompt[0]["content"]
        assert told["seed"] == 0
        # As published: random.Random(0), and one sample(range(4), 4) for each question in the order of the file.
        assert "ABCD"[draws.sample(range(4), 4).index(0)] == row.ground_truth
    assert {row.ground_truth for row in rows} == set("ABCD")
    _, others = convert("gpqa", records, tmp_path / "b", "--seed", "1")
    assert [row.ground_truth for row in others] != [row.ground_truth for row in rows]


def test_logicvista_comes_as_the_table_of_vlmevalkit_too(tmp_path):
    file = tmp_path / "LogicVista.tsv"
    image = base64.b64encode(RED).decode()
    file.write_text(f"index\timage\tquestion\tanswer\tskill\n5\t{image}\tWhich?\tAC\tspatial\n", encoding="utf-8")
    main = importlib.import_module("rltrain.data_preprocess.logicvista").main
    assert main(["--input", str(file), "--output", str(tmp_path / "out")]) == 0
    (row,) = rows = read_rows(str(tmp_path / "out/test.parquet"))
    assert (row.ground_truth, row.extra_info["id"], row.extra_info["category"]) == ("A, C", "5", "spatial")
    assert rows.images(0)[0]["bytes"] == RED


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        ("mathvista", MATHVISTA_CHOICE | {"answer": "5/11"}, "'5/11' is not one of the choices"),
        ("mathvista", MATHVISTA | {"answer": " "}, "the answer is empty"),
        ("mathvision", MATHVISION | {"answer": "F"}, "'F' is not the letter of one of 5 choices"),
        ("wemath", WEMATH | {"key": "steps"}, "field 'key' is 'steps'"),
        ("mmmu_pro", MMMU_PRO | {"options": "none"}, "field 'options' must be a list"),
        ("mathverse", MATHVERSE | {"query_cot": None}, "field 'query_cot' must be text"),
        ("gpqa", GPQA | {"Incorrect Answer 3": None}, "must be text"),
    ],
)
def test_a_record_that_cannot_be_asked_is_named(tmp_path, name, record, said, capsys):
    assert convert(name, [record], tmp_path)[0] == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["sample_variant", "sample"])
def test_dynamath_joins_ten_variants_that_rows_tell_apart(tmp_path, prefix, capsys):
    for variant in range(1, 11):
        records = [DYNAMATH | {"id": str(number), "ground_truth": "AB"[variant % 2]} for number in range(2)]
        write(tmp_path / f"in/data/{prefix}{variant}-00000-of-00001.parquet", records)
    options = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert dynamath.main(options) == 0
    rows = read_rows(str(tmp_path / "out/test.parquet"))
    told = [(row.extra_info["id"], row.extra_info["variant"], row.ground_truth) for row in rows]
    assert told == [(str(number), variant, "AB"[variant % 2]) for variant in range(1, 11) for number in range(2)]
    assert '"short answer"' in rows[0].prompt[0]["content"]
    assert rows[0].extra_info["choices"] == ["odd", "even"]
    assert dynamath.main([*options, "--prompt", "boxed"]) == 0
    (tmp_path / f"in/data/{prefix}1-00000-of-00001.parquet").unlink()  # variant10 begins with the same letters
    assert dynamath.main(options) == 2
    assert "has variants 2, 3, 4, 5, 6, 7, 8, 9, 10 of 10" in capsys.readouterr().err


def test_the_years_of_aime_are_told_apart(tmp_path, capsys):
    for dataset, record in (("aime24", AIME24), ("aime25", {"problem": "Find it.", "answer": "70", "id": "0"})):
        _, rows = convert("aime", [record], tmp_path / dataset, "--dataset", dataset)
        assert (rows[0].data_source, rows[0].extra_info["id"]) == (dataset, str(record["id"]))
    for wrong in (
        AIME24,
        {"ID": "2024-II-4", "Problem": "p", "Answer": 33},
        {"question": "p", "answer": "1", "url": "/2024_AIME_I"},
    ):
        assert convert("aime", [wrong], tmp_path / "wrong", "--dataset", "aime25", file="w.jsonl")[0] == 2
        assert "this is a problem of AIME 2024, and --dataset is aime25" in capsys.readouterr().err
