import base64
import json
import os
import pickle
import random
import shutil

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.common.errors import DataError
from rltrain.data.checks import Keys
from rltrain.data.rows import read_rows, scan_rows
from tests.images import BLUE, RED


def problem(path, **options):
    with pytest.raises(DataError) as caught:
        read_rows(path, **options)
    return str(caught.value)


def test_rows_come_back_as_written_with_lists_as_lists(tmp_path, write, good_row):
    path = write(tmp_path / "a.parquet", [good_row(i, extra_info={"index": i, "tags": ["x", "y"]}) for i in range(5)])
    rows = read_rows(path)
    assert len(rows) == 5
    row = rows[3]
    assert (row.data_source, row.ability, row.reward_style, row.ground_truth) == ("openai/gsm8k", "math", "rule", "4")
    assert row.prompt == [{"role": "user", "content": "what is 3 + 1 ?"}]
    assert row.extra_info == {"index": 3, "tags": ["x", "y"]}
    assert isinstance(row.prompt, list)
    assert isinstance(row.extra_info["tags"], list)
    assert rows[-1] == list(rows)[4]
    with pytest.raises(IndexError):
        rows[5]


def test_several_files_with_different_structs_are_one_sequence(tmp_path, write, good_row):
    one = write(tmp_path / "a.parquet", [good_row(0), good_row(1)])
    other = {"reward_model": {"style": "model", "ground_truth": 8}, "extra_info": {"question": "q"}}
    two = write(tmp_path / "b.parquet", [good_row(7, data_source="x/y", **other)])
    rows = read_rows([one, two])
    assert [row.ground_truth for row in rows] == ["1", "2", 8]
    assert rows[2].extra_info == {"question": "q"}
    assert rows.origin(2) == f"{two!r} row 0"
    assert rows.data_sources() == {"openai/gsm8k": 0, "x/y": 2}
    assert [row.ground_truth for row in rows.select([2, 0])] == [8, "1"]
    assert rows.select([2, 0]).data_sources() == {"x/y": 0, "openai/gsm8k": 1}


def test_other_prompt_and_source_columns_are_used(tmp_path, write, good_row):
    row = good_row()
    row["messages"], row["origin"] = row.pop("prompt"), row.pop("data_source")
    path = write(tmp_path / "a.parquet", [row])
    assert read_rows(path, keys=Keys("messages", "origin"))[0].data_source == "openai/gsm8k"
    assert "'prompt'" in problem(path, keys=Keys(source="origin"))
    assert "data.prompt_key" in problem(path, keys=Keys(source="origin"))


def test_a_seed_draws_the_rows_that_max_rows_keeps(tmp_path, write, good_row):
    paths = [
        write(tmp_path / f"{name}.parquet", [good_row(i + at) for i in range(50)]) for name, at in (("a", 0), ("b", 50))
    ]
    assert [row.ground_truth for row in read_rows(paths, max_rows=51)][-2:] == ["50", "51"], "without a seed the first"
    drawn = [[int(row.ground_truth) - 1 for row in read_rows(paths, max_rows=20, seed=seed)] for seed in (1, 1, 2)]
    for rows in drawn:
        assert rows == sorted(set(rows)), "in file order, each once"
        assert len(rows) == 20
        assert rows[0] < 50 <= rows[-1]
    assert drawn[0] == drawn[1] != drawn[2]


RULE = {"style": "rule", "ground_truth": "1"}


def test_nulls_that_parquet_adds_reach_no_prompt_and_no_tool(tmp_path, write, good_row):
    def row(number: int, arguments: dict, content: str | None) -> dict:
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        prompt = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
        kwargs = {"look": {"create_kwargs": arguments}}
        return good_row(number, prompt=prompt, extra_info={"tools_kwargs": kwargs, "note": None})

    rows = read_rows(str(write(tmp_path / "a.parquet", [row(0, {"town": "Rome"}, None), row(1, {"day": 3}, "x")])))
    for place, arguments in enumerate(({"town": "Rome"}, {"day": 3})):
        message = rows[place].prompt[1]
        assert message["tool_calls"][0]["function"]["arguments"] == arguments
        assert rows[place].extra_info == {"tools_kwargs": {"look": {"create_kwargs": arguments}}, "note": None}
    assert [rows[place].prompt[1]["content"] for place in (0, 1)] == ["", "x"]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"prompt": []}, ["'prompt'", "non-empty list of messages"]),
        ({"prompt": [{"role": "user", "content": None}]}, ["'prompt[0].content'", "must be text"]),
        ({"prompt": [{"role": None, "content": "a"}]}, ["'prompt[0].role'", "'user'"]),
        ({"prompt": [None]}, ["'prompt[0]'", "'role'"]),
        ({"prompt": "what is 1 + 1 ?"}, ["plain string", "'role': 'user'"]),
        ({"prompt": {"role": "user", "content": "x"}}, ["'prompt' is dict"]),
        ({"data_source": None}, ["'data_source'", "openai/gsm8k"]),
        ({"data_source": ""}, ["'data_source'", "openai/gsm8k"]),
        ({"data_source": 7}, ["'data_source' is int 7"]),
        ({"ability": 7}, ["'ability' is int 7"]),
        ({"extra_info": "{}"}, ["'extra_info' is str"]),
        ({"reward_model": None}, ["'reward_model'", "ground_truth"]),
        ({"reward_model": RULE | {"ground_truth": None}}, ["'reward_model.ground_truth'", "style"]),
        ({"reward_model": RULE | {"style": 3}}, ["'reward_model.style' is int 3"]),
    ],
)
def test_a_bad_row_is_named_with_file_row_and_field(tmp_path, write, good_row, changes, parts):
    rows = [json.dumps(row) for row in (good_row(0), good_row(1), good_row(2, **changes))]
    (tmp_path / "bad.jsonl").write_text("\n".join(rows))
    message = problem(str(tmp_path / "bad.jsonl"))
    for part in ("bad.jsonl' row 2: ", *parts):
        assert part in message
    rows, problems = scan_rows(str(tmp_path / "bad.jsonl"))
    assert (len(rows), len(problems)) == (2, 1)


def test_a_column_that_is_missing_or_of_another_type_is_named(tmp_path, write, good_row):
    row = good_row()
    del row["reward_model"]
    assert "no column 'reward_model'; it has 'data_source'" in problem(write(tmp_path / "a.parquet", [row]))
    for reward, said in (("72", "is string"), ({"style": "rule"}, "is struct")):
        message = problem(write(tmp_path / "a.parquet", [good_row(reward_model=reward)]))
        assert f"'reward_model' {said}" in message
        assert "'ground_truth': '72'" in message


def test_the_first_five_problems_are_reported(tmp_path, write, good_row):
    rows = [good_row(i, data_source=None if i % 2 else "openai/gsm8k") for i in range(20)]
    message = problem(write(tmp_path / "bad.parquet", rows))
    assert message.startswith("10 bad rows:")
    assert [f"row {i}:" in message for i in (1, 3, 5, 7, 9, 11)] == [True] * 5 + [False]
    assert "5 more" in message


def test_files_that_are_not_there_or_not_parquet_are_named(tmp_path):
    text = tmp_path / "text.parquet"
    text.write_text("hello")
    empty = tmp_path / "empty.parquet"
    empty.touch()
    assert "does not exist" in problem(str(tmp_path / "no.parquet"))
    assert "does not exist" in problem(str(text / "no.parquet"))
    assert "cannot be read as parquet" in problem(str(text))
    assert "0 bytes" in problem(str(empty))
    (tmp_path / "folder").mkdir()
    assert "is a folder without a parquet or jsonl file" in problem(str(tmp_path / "folder"))
    assert "remote address" in problem("hdfs://host/a.parquet")
    assert "no data file" in problem([])


def test_a_flipped_bit_never_changes_a_row_silently(tmp_path, write, good_row):
    path = tmp_path / "a.parquet"
    write(path, [good_row(i) for i in range(200)])
    whole, base = path.read_bytes(), list(read_rows(str(path)))
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    num_raised = 0
    for position in random.Random(0).sample(range(4, len(whole) - footer), 60):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            rows = list(read_rows(str(path)))
        except DataError:
            num_raised += 1
        else:
            assert rows == base  # the bit is not part of a row, but for example of a page statistic
    assert num_raised > 45


def test_the_fingerprint_notices_every_change_and_nothing_else(tmp_path, write, good_row):
    rows = [good_row(i) for i in range(10)]
    path = write(tmp_path / "a.parquet", rows)
    base = read_rows(path).fingerprint()
    shutil.copy(path, tmp_path / "moved.parquet")
    assert read_rows(str(tmp_path / "moved.parquet")).fingerprint() == base
    changed = [*rows[:9], good_row(9, reward_model={"style": "rule", "ground_truth": "11"})]
    others = [
        read_rows(write(tmp_path / "b.parquet", changed)),
        read_rows(write(tmp_path / "c.parquet", rows[:9])),
        read_rows(write(tmp_path / "d.parquet", [rows[1], rows[0], *rows[2:]])),
        read_rows([path, path]),
        *(
            read_rows(write(tmp_path / f"{at}.parquet", [good_row(images=[{"bytes": image}])]))
            for at, image in enumerate((RED, BLUE))
        ),
    ]
    assert len({base, *(other.fingerprint() for other in others)}) == 7
    # The same rows, selected in another way.
    assert read_rows(path, max_rows=9).fingerprint() == others[1].fingerprint()
    assert read_rows(path).select(range(9)).fingerprint() == others[1].fingerprint()
    assert read_rows(path).select([1, 0, *range(2, 10)]).fingerprint() == others[2].fingerprint()


def test_rows_that_another_program_saved_again_are_the_same(tmp_path, write, good_row):
    rows = [good_row(i, extra_info={"index": i, "note": None}) for i in range(10)]
    path = write(tmp_path / "a.parquet", rows)
    base = read_rows(path)
    frame = pd.read_parquet(path)
    frame["solved_by_me"] = 0.5
    frame.to_parquet(tmp_path / "renamed.parquet", compression="gzip", row_group_size=3)
    halves = [write(tmp_path / "one.parquet", rows[:4]), write(tmp_path / "two.parquet", rows[4:])]
    assert read_rows(str(tmp_path / "renamed.parquet")).fingerprint() == base.fingerprint()
    assert read_rows(halves).fingerprint() == base.fingerprint()
    assert base.identity() == f"{base.fingerprint()} 10 rows of {path}"


CODE = base64.b64encode(RED)
NO_PICTURE = base64.b64encode(b"<html>404: the picture that you asked for is not here</html>" * 9)


@pytest.mark.parametrize("image", [
    {"bytes": b"data:image/png;base64," + CODE, "path": "a.png"},
    {"bytes": base64.encodebytes(RED)},
    {"path": CODE.decode()},
    CODE,
])  # fmt: skip
def test_base64_images(tmp_path, write, good_row, image):
    rows = read_rows(write(tmp_path / "a.parquet", [good_row(0, images=[image])]))
    assert [entry["bytes"] for entry in rows.images(0)] == [RED]
    assert rows.stored_images().of(0) == [RED]


@pytest.mark.parametrize("image", [
    {"bytes": NO_PICTURE},
    {"path": "data:image/png;base64," + NO_PICTURE.decode()},
    {"path": "/9j/" + "A" * 5000 + ".png"},
])  # fmt: skip
def test_base64_of_a_non_image_is_a_short_error(tmp_path, write, good_row, image):
    path = write(tmp_path / "a.parquet", [good_row(0, images=[image])])
    said = problem(path).partition("field ")[2]
    assert len(said) < 170
    assert "cannot identify image file" in said or "is neither a file nor a base64 image" in said


def test_a_file_runs_nothing_that_it_names(tmp_path, good_row):
    import pyarrow as pa
    import pyarrow.parquet as pq

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "it_ran"),)

    table = pa.Table.from_pylist([good_row()])
    marks = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Payload())}
    crafted = table.schema.field("data_source").with_metadata(marks)
    schema = table.schema.set(table.schema.get_field_index("data_source"), crafted)
    pq.write_table(table.cast(schema.with_metadata({"pandas": b"\x80\x04not json"})), tmp_path / "crafted.parquet")
    kept = pq.read_metadata(tmp_path / "crafted.parquet").metadata[b"ARROW:schema"]
    assert b"py_extension_type" in base64.b64decode(kept)
    assert read_rows(str(tmp_path / "crafted.parquet"))[0].data_source == good_row()["data_source"]
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize(
    ("megabytes", "rows", "said"), [(65, 1, "row 3: ability has 68,157,440"), (40, 60, "row group 0")]
)
def test_a_text_that_a_small_file_repeats_is_an_error_of_the_file(tmp_path, good_row, megabytes, rows, said):
    texts = ["arithmetic", "b" * (megabytes << 20)]
    table = pa.Table.from_pylist([good_row(i) for i in range(3 + rows)])
    encoded = pa.DictionaryArray.from_arrays(pa.array([0] * 3 + [1] * rows, pa.int32()), pa.array(texts))
    table = table.drop_columns("ability").append_column("ability", encoded)
    file = tmp_path / "rows.parquet"
    pq.write_table(table, file, compression="zstd", dictionary_pagesize_limit=1 << 30)
    with pytest.raises(DataError, match=said) as refusal:
        read_rows(str(file))
    assert str(file) in str(refusal.value)
