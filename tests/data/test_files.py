"""The file formats of training data, and errors that name the format of other files."""

import gzip
import json

import pyarrow as pa
import pytest

from rltrain.common.errors import DataError
from rltrain.data.files import files_of
from rltrain.data.prompts import encode_prompts
from rltrain.data.rows import read_rows
from rltrain.data.tables import num_rows
from tests.images import BLUE, RED


def problem(path):
    with pytest.raises(DataError) as caught:
        read_rows(str(path))
    return str(caught.value)


def lines(rows, encoding="utf-8"):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(encoding)


def by_column(rows):
    return [(key, [row[key] for row in rows]) for key in rows[0]]


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("rows.jsonl", lines),
        ("rows.jsonl.gz", lambda rows: gzip.compress(lines(rows))),
        ("rows.jsonl.zst", lambda rows: pa.compress(lines(rows), "zstd", asbytes=True)),
        ("rows.json", lambda rows: json.dumps(rows, indent=1).encode()),
        ("one_a_line.json", lines),
        ("of_windows.jsonl", lambda rows: lines(rows, "utf-8-sig").replace(b"\n", b"\r\n\r\n")),
        ("wide.jsonl", lambda rows: lines(rows, "utf-16")),
        ("printed.jsonl", lambda rows: "\n".join(json.dumps(each, indent=2) for each in rows).encode()),
        ("under_a_name.json", lambda rows: json.dumps({"version": 1, "data": rows}).encode()),
        ("of_pandas.json", lambda rows: json.dumps({key: dict(enumerate(of)) for key, of in by_column(rows)}).encode()),
        ("named.parquet", lines),
    ],
)
def test_json_in_each_of_its_forms_is_read_as_the_same_rows_in_parquet(tmp_path, write, good_row, name, pack):
    rows = [good_row(number, ability="Grüße, 数学") for number in range(3)]
    (tmp_path / name).write_bytes(pack(rows))
    expected = read_rows(write(tmp_path / "rows.parquet_", rows))
    found = read_rows(str(tmp_path / name))
    assert list(found) == list(expected)
    assert found.fingerprint() == expected.fingerprint()
    assert num_rows(str(tmp_path / name)) == 3
    assert found.origin(2) == f"{str(tmp_path / name)!r} row 2"


def test_json_image_paths_are_relative_to_the_file(tmp_path, write, good_row, monkeypatch):
    (tmp_path / "data/images").mkdir(parents=True)
    (tmp_path / "data/images/a.png").write_bytes(RED)
    (tmp_path / "data/images/b.png").write_bytes(BLUE)
    rows = [good_row(at, images=[f"images/{name}.png"]) for at, name in enumerate("ab")]
    (tmp_path / "data/a.jsonl").write_bytes(lines(rows))
    monkeypatch.chdir(tmp_path)
    found = read_rows("data/a.jsonl").select([1, 0])
    pictures = found.stored_images()
    monkeypatch.chdir("/")  # as in a worker
    assert [pictures.of(row) for row in (0, 1)] == [[BLUE], [RED]]
    (tmp_path / "data/images/b.png").write_bytes(RED)
    with pytest.raises(DataError, match="have changed"):
        pictures.of(0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n".encode(), "git lfs pull"),
        (b"<!DOCTYPE html><html>Sign in</html>", "a web page"),
        (b"PK\x03\x04rest", "a zip archive or an Excel workbook"),
        (b"\x80\x04\x95rest", "a pickle"),
        (gzip.compress(b'{"prompt": 1}' * 99, mtime=0)[:-20], "truncated or damaged"),
        (b"", "is empty (0 bytes)"),
        (b"hello", "cannot be read as parquet"),
    ],
)
def test_unsupported_file_types_are_named(tmp_path, content, said):
    (tmp_path / "pointer.parquet").write_bytes(content)
    assert said in problem(tmp_path / "pointer.parquet")
    with pytest.raises(DataError) as caught:
        num_rows(str(tmp_path / "pointer.parquet"))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": 1}\n{"a": 2}\n\n{"a": "cut', "line 4 is not complete JSON"),
        (b'{"a": "cut', "line 1 is not complete JSON"),
        (b'\n[{"a": 1},\n{"a": }]', "line 3 is not complete JSON"),
        (b'{"a": 1}\n{"a": "\xe9"}\n', "line 2 is not UTF-8"),
        (b'{"a": 1}\n["text"]\n', "row 1 is a list; each must be an object"),
        (b'{"question": "2+3", "answer": "5"}\n', "it has 'question', 'answer'"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, text, said):
    (tmp_path / "a.jsonl").write_bytes(text)
    assert said in problem(tmp_path / "a.jsonl")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_line_that_a_small_file_unpacks_to_is_bounded(tmp_path, encoding):
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", 1) as file:
        file.write('{"a": 1}\n{"a": "'.encode(encoding))
        for _ in range(300):
            file.write(bytes(1 << 20) if encoding == "utf-16" else b"a" * (1 << 20))
    said = problem(tmp_path / "a.jsonl.gz")
    assert "a.jsonl.gz' " in said
    assert ("line 2 has more than 268,435,456 bytes" if encoding == "utf-8" else "268,435,456 bytes of UTF-16") in said


def test_lone_surrogate_is_replaced_with_a_warning(tmp_path, good_row, tokenizer_folder, caplog):
    from rltrain.data.chat import ChatEncoder

    whole = json.dumps(good_row(1))
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(good_row())}\n{whole.replace('what', chr(92) + 'ud83d')}\n")
    rows = read_rows(str(tmp_path / "a.jsonl"))
    assert rows[1].prompt[0]["content"] == "\ufffd is 1 + 1 ?"
    assert "1 rows, first in row 1" in caplog.text
    encode_prompts(rows, ChatEncoder(str(tokenizer_folder)), 99)


def test_patterns_and_folders_are_their_files_in_order(tmp_path, write, good_row):
    (tmp_path / "d/below").mkdir(parents=True)
    for at, name in enumerate(("train-00001", "train-00000", "train-00010")):
        write(tmp_path / f"d/{name}.parquet", [good_row(at)])
    (tmp_path / "d/_SUCCESS").touch()
    (tmp_path / "d/.train-00000.parquet.crc").write_bytes(b"x")
    for name in (tmp_path / "d", tmp_path / "d/train-*.parquet", tmp_path / "**/*.parquet"):
        assert [row.ground_truth for row in read_rows(str(name))] == ["2", "1", "3"]
    both = read_rows([str(tmp_path / "d"), str(tmp_path / "d/train-00001.parquet")])
    assert len(both) == 4
    assert both.paths.endswith("train-00010.parquet, " + str(tmp_path / "d/train-00001.parquet"))
    assert "(2 more)" in read_rows([*[str(tmp_path / "d")], *[str(tmp_path / "d/train-00001.parquet")] * 2]).paths
    write(tmp_path / "a[1].parquet", [good_row(7)])
    assert files_of(str(tmp_path / "a[1].parquet")) == [str(tmp_path / "a[1].parquet")], "a file of this very name"


def test_a_folder_is_never_guessed_at(tmp_path, write, good_row):
    write(tmp_path / "train.parquet", [good_row(0)])
    write(tmp_path / "test.parquet", [good_row(1)])
    assert "files of several splits (test.parquet, train.parquet)" in problem(tmp_path)
    (tmp_path / "up").mkdir()
    assert "without a parquet or jsonl file" in problem(tmp_path / "up")
    (tmp_path / "up/data").mkdir()
    (tmp_path / "up/data/a.jsonl").write_bytes(lines([good_row()]))
    assert f"Did you mean '{tmp_path}/up/data'?" in problem(tmp_path / "up")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/dataset_info.json").write_text("{}")
    assert "load_from_disk" in problem(tmp_path / "saved")
    (tmp_path / "a.csv").write_text("question,answer\n2+3,5\n")
    assert "rltrain.data_preprocess.jsonl --input" in problem(tmp_path / "a.csv")
