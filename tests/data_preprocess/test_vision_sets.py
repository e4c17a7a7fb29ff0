"""Data sets with images, from the hub's records to a run's prompts."""

import importlib
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.data.rows import read_rows

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from rltrain.data.chat import ChatEncoder
from rltrain.data.prompts import encode_prompts
from tests.tiny_vision import IMAGE, picture, save_tiny_vision_model


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return ChatEncoder(str(save_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl", tied=True)))


def drawing(number: int, kind: str = "PNG", size: tuple[int, int] = (90, 60)) -> bytes:
    file = io.BytesIO()
    picture(*size, number).save(file, kind)
    return file.getvalue()


def geometry3k(folder: Path) -> list[list[bytes]]:
    """geometry3k as on the hub: images in the records."""
    images = [[drawing(number)] for number in range(3)]
    records = [
        {"images": [{"bytes": data, "path": None} for data in of], "problem": f"<image>Find x_{number}.", "answer": "3"}
        for number, of in enumerate(images)
    ]
    pq.write_table(pa.Table.from_pylist(records), folder / "train-00000-of-00001.parquet")
    return images


def virl39k(folder: Path) -> list[list[bytes]]:
    """virl39k as on the hub, unpacked: image files of several kinds next to the records, two for one question, and
    none; one is truncated."""
    images = [[drawing(0), drawing(1, "JPEG", (60, 130))], [], [drawing(2, "JPEG")]]
    (folder / "images").mkdir()
    records = []
    for number, of in enumerate([*images, [drawing(3)[:-20]]]):
        names = [f"images/{number}-{place}.jpg" for place in range(len(of))]
        for name, data in zip(names, of, strict=True):
            (folder / name).write_bytes(data)
        slots = "<image>" * len(of) if number else "Left: <image>, right: <image>. "
        records.append({"question": f"{slots}Which?", "answer": "\\boxed{A}", "image": names, "qid": str(number)})
    (folder / "39Krelease.jsonl").write_text("\n".join(map(json.dumps, records)))
    return images


@pytest.mark.parametrize("made", [geometry3k, virl39k], ids=lambda made: made.__name__)
def test_a_data_set_comes_to_the_model_as_it_was_drawn(made, tmp_path, encoder, capsys):
    images = made(tmp_path)
    main = importlib.import_module(f"rltrain.data_preprocess.{made.__name__}").main
    assert main(["--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    assert ("1 dropped: an image cannot be read (1)" in capsys.readouterr().out) == (made is virl39k)
    rows = read_rows(str(tmp_path / "out/train.parquet"))
    store = encode_prompts(rows, encoder, 2000)
    assert store.num_images.tolist() == [len(of) for of in images]
    for i, of in enumerate(images):
        expected = encoder.encode_prompt(rows[i].prompt, of)
        found = store.encoded(i)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert np.count_nonzero(store.short(i) == IMAGE) == len(of)
        if of:
            assert np.array_equal(found.images.pixel_values, expected.images.pixel_values)
