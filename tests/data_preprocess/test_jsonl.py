"""The converter of a user's own files: their forms, and errors with file, row and field."""

import base64
import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.data.rows import read_rows
from rltrain.data_preprocess.jsonl import main
from tests.images import BLUE, RED


@pytest.fixture
def convert(tmp_path, capsys):
    """Convert a file (or records, as JSON lines). Returns the rows or the error, and the output."""

    def run(given, *options, source="math_dapo"):
        file = given
        if isinstance(given, list):
            file = tmp_path / "records.jsonl"
            file.write_text("".join(json.dumps(each) + "\n" for each in given))
        columns = ["--prompt-column", "question", "--answer-column", "answer", "--data-source", source]
        code = main(["--input", str(file), "--output", str(tmp_path / "out"), *columns, *options])
        out, error = capsys.readouterr()
        assert code == (2 if error else 0)
        return (error, out) if code else (list(read_rows(str(tmp_path / "out/train.parquet"))), out)

    return run


def content(rows):
    return [[(each["role"], each["content"]) for each in row.prompt] for row in rows]


PLAIN = [("user", "2+3=?")]


@pytest.mark.parametrize("answer", ["", "  ", ["", " "]])
def test_a_blank_answer_or_question_is_dropped_and_told(convert, answer):
    blank = {"question": "2+2", "answer": answer}
    rows, out = convert([blank, {"question": " ", "answer": "1"}, {"question": "1+2", "answer": "3"}])
    assert [row.ground_truth for row in rows] == ["3"]
    assert "no answer in 'answer'" in out
    assert "the prompt is empty" in out


@pytest.mark.parametrize("name", ["twice.csv", "twice.jsonl", "twice.parquet"])
def test_a_name_that_stands_twice_is_refused(convert, tmp_path, name):
    file = tmp_path / name
    if name.endswith("parquet"):
        columns = [pa.array([text]) for text in ("2+2", "4", "5")]
        pq.write_table(pa.Table.from_arrays(columns, names=["question", "answer", "answer"]), file)
    else:
        line = '{"question": "2+2", "answer": "4", "answer": "5"}\n'
        file.write_text("question,answer,answer\n2+2,4,5\n" if name.endswith("csv") else line)
    error, _ = convert(file)
    assert str(file) in error
    assert "'answer'" in error
    assert "Rename or drop" in error


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("2+3=?", PLAIN),
        ([{"role": "user", "content": "2+3=?"}], PLAIN),
        ({"role": "user", "content": "2+3=?"}, PLAIN),
        ([{"from": "system", "value": "s"}, {"from": "human", "value": "2+3=?"}], [("system", "s"), *PLAIN]),
        (
            [{"from": name, "value": "x"} for name in ("human", "gpt", "observation", "User", "chatgpt", "human")],
            [(role, "x") for role in ("user", "assistant", "tool", "user", "assistant", "user")],
        ),
        ({"messages": [{"role": "user", "content": "2+3=?"}]}, PLAIN),
        ([{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3=?"}]}], PLAIN),
        (["2+3=?"], PLAIN),
        (json.dumps([{"role": "user", "content": "2+3=?"}]), PLAIN),
        ('[{"x": 1}] is a list', [("user", '[{"x": 1}] is a list')]),
    ],
)
def test_prompts_in_each_form_become_messages(convert, question, wanted):
    assert content(convert([{"question": question, "answer": "5"}])[0]) == [wanted]


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ([{"content": "2+3"}], "'question'[0]: the role is missing (the message has content)"),
        ([{"from": "narrator", "value": "x"}], "'question'[0]: the role is 'narrator'; supported are system"),
        ([{"from": "human", "text": None}], "'question'[0] has no content; it has from, text"),
        ([{"role": "user", "content": {"a": 1}}], "'question'[0]: the content is dict"),
        ([{"role": "user", "content": [{"type": "video", "video": "x" * 9999}]}], "holds a part of type 'video'"),
        ([{"role": "user", "content": "x"}, "y"], "'question'[1] is str 'y'; a message is"),
        (5, "'question' is int 5; it must be text, or a list of messages"),
        (None, "'question' does not exist or is null; columns: 'question', 'answer'"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_named_with_file_row_and_field(convert, question, said):
    error, _ = convert([{"question": "2+3", "answer": "5"}, {"question": question, "answer": "5"}])
    assert re.match(r"error: '.*records.jsonl' row 1: ", error)
    assert said in error
    assert len(error) < 500


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        (["5", 6, 7.0, 8.5, True], ["5", "6", "7", "8.5", "True"]),
        (["5", ["6", 7.0]], [["5"], ["6", "7"]]),
        ([["6", "7"], "12"], [["6", "7"], ["12"]]),
    ],
)
def test_answers_may_change_their_types(convert, answers, wanted):
    rows, _ = convert([{"question": f"{at}?", "answer": answer} for at, answer in enumerate(answers)])
    assert [row.ground_truth for row in rows] == wanted


def test_rows_without_an_answer_are_counted(convert):
    given = [{"question": f"{at}?", "answer": answer} for at, answer in enumerate(["5", None, float("nan"), []])]
    rows, out = convert(given)
    assert len(rows) == 1
    assert "3 dropped: no answer in 'answer' (3)" in out


def test_an_answer_of_several_fields_names_the_one_to_give(convert):
    given = [{"question": "2+3", "answer": {"value": 5.0, "unit": "cm"}}]
    error, _ = convert(given)
    assert (
        "row 0: --answer-column 'answer' holds {value, unit}. Say which field, such as --answer-column answer.value."
        in error
    )
    assert [row.ground_truth for row in convert(given, "--answer-column", "answer.value")[0]] == ["5"]
    error, _ = convert([{"question": "2+3", "answer": ["5", {"value": 5}]}])
    assert "--answer-column 'answer[1]' holds {value}" in error


def test_half_a_character_is_replaced_and_counted(convert, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        rb'{"question": "2+3 \ud83d", "answer": "5"}' + b"\n" + rb'{"question": "\ud83d\ude00", "answer": "6"}'
    )
    rows, out = convert(tmp_path / "a.jsonl")
    assert content(rows) == [[("user", "2+3 \ufffd")], [("user", "\U0001f600")]]
    assert "train: 1 rows with half a character" in out


TABLE = "question,answer\n2+3,5\n"


@pytest.mark.parametrize(
    ("name", "data", "wanted"),
    [
        ("a.csv", TABLE.encode(), [("2+3", "5")]),
        ("a.tsv", b"question\tanswer\n2,3\t5\n", [("2,3", "5")]),
        ("a.csv", '\ufeffquestion;answer\r\n"a;\r\nb";007\r\n\r\n'.encode(), [("a;\r\nb", "007")]),
        ("a.csv", TABLE.encode("utf-16"), [("2+3", "5")]),
        ("a.json", b'{"question": ["2+3", "4"], "answer": ["5", "4"]}', [("2+3", "5"), ("4", "4")]),
        ("a.json", b'{"question": {"0": "2+3"}, "answer": {"0": 5}}', [("2+3", "5")]),
        ("a.json", b'[\n{"question": "2+3", "answer": 5}\n]', [("2+3", "5")]),
        ("a.jsonl.gz", gzip.compress(b'{"question": "2+3", "answer": 5}', mtime=0), [("2+3", "5")]),
    ],
)
def test_files_of_many_kinds_are_read(convert, tmp_path, name, data, wanted):
    (tmp_path / name).write_bytes(data)
    rows, _ = convert(tmp_path / name)
    assert [(row.prompt[0]["content"], row.ground_truth) for row in rows] == wanted


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.csv", b"question,answer\n1,2\n1,2,3\n", "line 3 has 3 cells, but the first line has 2"),
        ("a.csv", b'question,answer\n1,"2\n', "line 2 is not a complete csv line"),
        ("a.jsonl", b'{"question": "1", "answer": "2"}\n{"question": "1", "ans', "line 2 is not complete JSON"),
        ("a.jsonl", b'{"question": "1", "answer": "2"}\n\n["1"]', "row 1: it has no columns"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.xlsx", b"PK\x03\x04", "an Excel workbook"),
        ("a.jsonl.gz", gzip.compress(b'{"question": "1", "answer": "2"}' * 50, mtime=0)[:-20], "truncated or damaged"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(convert, tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    error, _ = convert(tmp_path / name)
    assert name in error
    assert said in error


def test_a_column_that_changes_its_types_is_named(convert):
    error, _ = convert([{"question": "1", "answer": "1", "x": 1, "y": y} for y in ("a", ["b"])], "--keep", "x", "y")
    assert "extra_info.y changes its type (row 0: str, row 1: list); store it as JSON text" in error


def test_pictures_in_base64_become_files(convert, tmp_path):
    code = base64.b64encode(RED).decode()
    (tmp_path / "there.png").write_bytes(BLUE)
    images = [f"data:image/png;base64,{code}", code, {"bytes": code}, "there.png"]
    images += [{"image_url": {"url": f"data:;base64,{code}"}}]
    given = [{"question": f"{at}?", "answer": "5", "images": image} for at, image in enumerate(images)]
    convert(given, "--image-column", "images")
    table = pq.read_table(tmp_path / "out/train.parquet").column("images").to_pylist()
    assert [row[0]["bytes"] for row in table] == [RED, RED, RED, BLUE, RED]
