"""Converters on small inputs with the columns, nesting and types of the originals on the hub."""

import importlib
import json
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.data.rows import read_rows
from rltrain.data_preprocess import aime, boba, common
from tests.images import BLUE, RED

MATH = {
    "problem": "What is $1+1$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": "First \\boxed{3}, no: \\boxed{\\frac{4}{2}}.",
}
MATH500 = {
    "problem": "Add.",
    "solution": "…",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
AIME24 = {"id": 60, "problem": "Aya walks.", "solution": "…", "answer": "073", "url": "https://…", "year": "2024"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve… Answer: $Answer\n\nWhat is 5?", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
DEEPSCALER = {"problem": "The operation $\\otimes$…", "answer": "-\\frac{2}{3}", "solution": ""}
BOBA = {
    "prompt": "<｜User｜>\nHow many?\nPut it in \\boxed{}.<｜Assistant｜><think>\n",
    "query_id": "q1",
    "solutions": ["\\boxed{1/2}", "\\boxed{0.5}"],
}
GEOMETRY = {
    "images": [{"bytes": RED, "path": None}],
    "problem": "<image>Find two different sides.",
    "answer": "3\\sqrt{2}",
}
VIRL = {
    "question": "<image>Compare with <image>: which is bigger?",
    "answer": "\\boxed{A}",
    "PassRate_7BBase": 0.25,
    "category": "Spatial Reasoning",
    "source": "Processed",
    "qid": "Processed-1",
    "image": ["images/a.png", "images/b.png"],
}
CLEVR = {
    "images": [{"bytes": BLUE, "path": "0.png"}],
    "problem": "<image>How many different items are there?",
    "answer": "4",
}
HH = {"prompt": "\n\nHuman: Hi?\n\nAssistant:", "response": " Hello.", "chosen": " Hello.", "rejected": " No."}
ULTRA = {
    "prompt": "Write a poem.",
    "chosen": [{"content": "Write a poem.", "role": "user"}, {"content": "Roses.", "role": "assistant"}],
    "rejected": [{"content": "Write a poem.", "role": "user"}, {"content": "No.", "role": "assistant"}],
    "score_chosen": 8.5,
    "score_rejected": 2.0,
}
APPS = {
    "question": "Print the sum.",
    "input_output": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}),
    "difficulty": "interview",
    "url": "https://…",
}
CONTESTS = {
    "name": "1_A",
    "description": "Print the sum.",
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": {"input": [], "output": []},
    "generated_tests": {"input": ["3 4\n"], "output": ["7\n"]},
    "difficulty": 7,
}

# name, options, records, split, data source, what follows the problem's own text, ground truth of the first row
SETS = {
    "math_dataset": ([], MATH, "train", "DigitalLearningGmbH/MATH-lighteval", MATH["problem"], "\\frac{4}{2}"),
    "math500": ([], MATH500, "test", "HuggingFaceH4/MATH-500", MATH500["problem"], MATH500["answer"]),
    "aime": (["--dataset", "aime24"], AIME24, "test", "aime24", AIME24["problem"], "73"),
    "dapo_math_17k": ([], DAPO, "train", "math_dapo", DAPO["prompt"][0]["content"], "34"),
    "deepscaler": (
        [],
        DEEPSCALER,
        "train",
        "agentica-org/DeepScaleR-Preview-Dataset",
        DEEPSCALER["problem"],
        "-\\frac{2}{3}",
    ),
    "boba": ([], BOBA, "train", "inclusionAI/AReaL-boba-Data", "\nHow many?\nPut it in \\boxed{}.", BOBA["solutions"]),
    "geometry3k": ([], GEOMETRY, "train", "hiyouga/geometry3k", GEOMETRY["problem"], GEOMETRY["answer"]),
    "virl39k": ([], VIRL, "train", "TIGER-Lab/ViRL39K", VIRL["question"], "A"),
    "clevr_count": ([], CLEVR, "train", "BUAADreamer/clevr_count_70k", CLEVR["problem"], "4"),
    "hh": ([], HH, "train", "Dahoas/full-hh-rlhf", HH["prompt"], " Hello."),
    "code_contests": (["--dataset", "taco"], APPS, "train", "taco", APPS["question"], APPS["input_output"]),
}


def write(file, records):
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), file)
    else:
        lines = file.suffix == ".jsonl"
        file.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records), encoding="utf-8")
    return file


def images_in(folder):
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, data in (("a.png", RED), ("b.png", BLUE)):
        (folder / "images" / name).write_bytes(data)


def convert(name, records, folder, *options, file="train.parquet"):
    """Return the rows of the first split that was written."""
    images_in(folder)
    given = write(folder / file, records)
    main = importlib.import_module(f"rltrain.data_preprocess.{name}").main
    assert main(["--input", str(given), "--output", str(folder / "out"), *options]) == 0
    return read_rows(str(next(iter(sorted((folder / "out").glob("*.parquet"))))))


@pytest.mark.parametrize("name", SETS)
def test_a_record_becomes_a_row_with_verl_s_data_source(tmp_path, name):
    options, record, split, source, text, truth = SETS[name]
    more = record | {"problem": "Another?<image>" if "images" in record else "Another?"}
    rows = convert(name, [record, more], tmp_path, *options)
    (file,) = (tmp_path / "out").iterdir()
    written = file.read_bytes()
    convert(name, [record, more], tmp_path, *options)
    assert file.read_bytes() == written
    assert [file.name for file in (tmp_path / "out").iterdir()] == [f"{split}.parquet"]
    assert (rows[0].data_source, rows[0].ground_truth) == (source, truth)
    assert [message["role"] for message in rows[0].prompt] == ["user"]
    assert rows[0].prompt[0]["content"].startswith(text)
    assert (rows[0].extra_info["split"], rows[0].extra_info["index"]) == (split, 0)
    assert rows[0].reward_style == ("model" if name == "hh" else "rule")


def test_a_hub_folder_with_shards_gives_both_splits_in_order(tmp_path, capsys):
    for part in range(2):
        records = [GEOMETRY | {"answer": str(10 * part + number)} for number in range(3)]
        write(tmp_path / f"in/data/train-0000{part}-of-00002.parquet", records)
    write(tmp_path / "in/data/test-00000-of-00001.parquet", [GEOMETRY])
    write(tmp_path / "in/data/validation-00000-of-00001.parquet", [GEOMETRY])
    main = importlib.import_module("rltrain.data_preprocess.geometry3k").main
    assert main(["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    train = read_rows(str(tmp_path / "out/train.parquet"))
    assert [row.ground_truth for row in train] == ["0", "1", "2", "10", "11", "12"]
    assert len(read_rows(str(tmp_path / "out/test.parquet"))) == 1
    (tmp_path / "in/data/train-00001-of-00002.parquet").unlink()
    assert main(["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 2
    assert "1 of 2 parts" in capsys.readouterr().err


def test_a_folder_with_several_files_asks_which(tmp_path, capsys):
    write(tmp_path / "in/AReaL-boba-106k.jsonl", [BOBA])
    assert boba.main(["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    write(tmp_path / "in/AReaL-boba-SFT-200.jsonl", [BOBA])
    assert boba.main(["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 2
    assert "several data files" in capsys.readouterr().err


def test_images_and_texts_stay_as_they_are(tmp_path):
    rows = convert("geometry3k", [GEOMETRY], tmp_path / "a")
    assert rows.images(0) == [{"bytes": RED, "path": None}]
    assert rows[0].prompt[0]["content"].startswith("<image>Find two different sides. ")
    rows = convert("virl39k", [VIRL], tmp_path / "b")
    assert [image["bytes"] for image in rows.images(0)] == [RED, BLUE]
    assert rows[0].extra_info["PassRate_7BBase"] == 0.25
    assert rows[0].extra_info["category"] == "Spatial Reasoning"
    rows = convert("clevr_count", [CLEVR], tmp_path / "c")
    assert rows.images(0)[0]["bytes"] == BLUE
    assert "different items" in rows[0].prompt[0]["content"]


def test_there_is_one_slot_for_each_image(tmp_path, capsys):
    records = [
        VIRL,
        VIRL | {"question": "Which?"},  # no slot: one is put before the text for each image
        VIRL | {"question": "<image>Which?"},  # one slot, two images
        VIRL | {"image": []} | {"question": "No picture."},
        VIRL | {"image": ["images/gone.png"], "question": "<image>?"},
        VIRL | {"answer": "A"},
    ]
    rows = convert("virl39k", records, tmp_path)
    found = [(row.prompt[0]["content"].count("<image>"), len(rows.images(i))) for i, row in enumerate(rows)]
    assert found == [(2, 2), (2, 2), (0, 0)]
    assert rows[1].prompt[0]["content"].startswith("<image><image>\nWhich?")
    assert [row.extra_info["index"] for row in rows] == [0, 1, 3]
    shown = capsys.readouterr().out
    assert "train: 3 dropped" in shown
    for reason in ("differs from the number of images (1)", "an image is missing (1)", "has no \\boxed{} (1)"):
        assert reason in shown
    assert f"<{len(RED)} bytes>" in shown


def test_a_math_solution_without_a_box_is_dropped(tmp_path, capsys):
    rows = convert("math_dataset", [MATH, MATH | {"solution": "no box"}, MATH | {"solution": "$\\boxed 5$."}], tmp_path)
    assert [row.ground_truth for row in rows] == ["\\frac{4}{2}", "5"]
    assert "train: 1 dropped: the solution has no \\boxed{} (1)" in capsys.readouterr().out


def test_dapo_prompts_come_once_in_either_layout(tmp_path, capsys):
    rows = convert("dapo_math_17k", [DAPO] * 100, tmp_path / "a")
    assert len(rows) == 1
    assert "a repeated prompt (99)" in capsys.readouterr().out
    assert rows[0].prompt == [{"role": "user", "content": DAPO["prompt"][0]["content"]}]
    processed = DAPO | {"prompt": "What is 5?", "solution": "34", "source_prompt": DAPO["prompt"]}
    assert convert("dapo_math_17k", [processed], tmp_path / "b")[0].prompt == rows[0].prompt


def test_aime_copies_of_every_shape_give_a_plain_number(tmp_path, capsys):
    shapes = [
        {"ID": "2025-II-4", "Problem": "p1", "Solution": "…", "Answer": 33},
        {"question": "p2", "answer": "336^\\circ"},
        {"problem": "p3", "answer": "$25$"},
        {"problem": "p4", "answer": "000"},
        {"problem": "p4", "answer": "000"},
        {"problem": "p5", "answer": "m+n"},
    ]
    rows = convert("aime", shapes, tmp_path / "a", "--dataset", "aime25", file="aime.jsonl")
    assert [row.ground_truth for row in rows] == ["33", "336", "25", "0"]
    assert {row.data_source for row in rows} == {"aime25"}
    assert "the answer is not a number from 0 to 999 (1)" in capsys.readouterr().out
    assert len(convert("aime", [DAPO] * 32, tmp_path / "b")) == 1
    assert aime.main(["--input", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "out")]) == 2


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (BOBA["prompt"], "\nHow many?\nPut it in \\boxed{}."),
        ("<｜begin▁of▁sentence｜><｜User｜>Q<｜Assistant｜>", "Q"),
        ("Q as it is", "Q as it is"),
        ("<｜User｜>one<｜Assistant｜>two<｜User｜>three<｜Assistant｜>", None),
    ],
)
def test_boba_s_template_comes_off_and_nothing_else(tmp_path, prompt, text):
    rows = convert("boba", [BOBA, BOBA | {"prompt": prompt, "query_id": "mine"}], tmp_path, file="boba.jsonl")
    mine = [row for row in rows if row.extra_info["query_id"] == "mine"]
    assert [row.prompt[0]["content"] for row in mine] == ([] if text is None else [text])


def test_ultrafeedback_prompts_come_from_the_preference_splits(tmp_path):
    for split in ("train_gen", "train_prefs", "train_sft", "test_gen", "test_prefs"):
        write(tmp_path / f"in/data/{split}-00000-of-00001.parquet", [ULTRA | {"prompt": split}])
    hh = importlib.import_module("rltrain.data_preprocess.hh")
    assert (
        hh.main(["--dataset", "ultrafeedback", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    )
    for split in ("train", "test"):
        (row,) = read_rows(str(tmp_path / f"out/{split}.parquet"))
        assert row.prompt == [{"role": "user", "content": f"{split}_prefs"}]
        assert (row.data_source, row.reward_style) == ("HuggingFaceH4/ultrafeedback_binarized", "model")
        assert row.ground_truth == "Roses."


def test_tests_of_a_program_are_json_with_an_output_per_input(tmp_path, capsys):
    wanted = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    broken = [
        {"input_output": text}
        for text in ("", "{", "[]", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}')
    ]
    rows = convert("code_contests", [APPS, *(APPS | each for each in broken)], tmp_path / "a", file="train.jsonl")
    assert [json.loads(row.ground_truth) for row in rows] == [wanted]
    assert rows[0].data_source == "apps"
    assert "5 dropped" in capsys.readouterr().out
    rows = convert("code_contests", [CONTESTS], tmp_path / "b", "--dataset", "codecontests")
    assert (rows[0].data_source, json.loads(rows[0].ground_truth)) == ("codecontests", wanted)


def test_a_function_to_complete_is_shown(tmp_path):
    tests = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    record = APPS | {"input_output": json.dumps(tests), "starter_code": "def add(a, b):\n\t"}
    (row,) = convert("code_contests", [record], tmp_path)
    assert json.loads(row.ground_truth) == tests
    assert row.prompt[0]["content"].endswith("```python\ndef add(a, b):\n```")


def test_columns_of_any_file_can_be_named(tmp_path):
    record = {
        "q": {"text": "How many?"},
        "right": ["4", "four"],
        "set": "clevr_count/mine",
        "pictures": ["images/a.png"],
    }
    named = ["--prompt-column", "q.text", "--answer-column", "right", "--data-source-column", "set"]
    more = ["--image-column", "pictures", "--system", "Count.", "--instruction", "Think."]
    (row,) = rows = convert("jsonl", [record], tmp_path, *named, *more, file="mine.jsonl")
    assert [message["content"] for message in row.prompt] == ["Count.", "<image>\nHow many? Think."]
    assert (row.data_source, row.ground_truth) == ("clevr_count/mine", ["4", "four"])
    assert rows.images(0) == [{"bytes": RED, "path": "a.png"}]


OTHERS = {file.stem for file in Path(common.__file__).parent.glob("*.py")} - SETS.keys()
WITHOUT_RECORDS = {"__init__", "benchmark", "common", "lint", "messages", "sources"}
WITHOUT_RECORDS |= {
    "arithmetic",
    "dynamath",
    "frozen_lake",
    "guess_number",
    "jsonl",
    "moving_square",
    "reasoning_gym",
    "rectangles",
}


@pytest.mark.parametrize("name", sorted({*SETS, *OTHERS} - WITHOUT_RECORDS))
def test_an_input_of_another_shape_is_an_error_and_not_a_drop(tmp_path, capsys, name):
    main = importlib.import_module(f"rltrain.data_preprocess.{name}").main
    options = SETS[name][0] if name in SETS else []
    for record in ({"text": "something else"}, "text"):
        file = write(tmp_path / "other.jsonl", [record])
        assert main(["--input", str(file), "--output", str(tmp_path / "out"), *options]) == 2
        assert "other.jsonl' row 0: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_input_that_leaves_no_row_says_why(tmp_path, capsys):
    file = write(tmp_path / "a.jsonl", [DEEPSCALER | {"answer": " "}] * 3)
    main = importlib.import_module("rltrain.data_preprocess.deepscaler").main
    assert main(["--input", str(file), "--output", str(tmp_path / "out")]) == 2
    assert "leaves no row: the answer is empty (3)" in capsys.readouterr().err


def test_without_a_local_file_the_hub_is_asked_for_stored_bytes(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        batches = types.SimpleNamespace(iter=lambda batch_size: [pa.Table.from_pylist([GEOMETRY])])
        return types.SimpleNamespace(with_format=lambda kind: batches if kind == "arrow" else None)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    main = importlib.import_module("rltrain.data_preprocess.geometry3k").main
    assert main(["--output", str(tmp_path)]) == 0
    assert asked == [("hiyouga/geometry3k", None, split) for split in ("train", "test")]
    assert read_rows(str(tmp_path / "test.parquet")).images(0)[0]["bytes"] == RED
