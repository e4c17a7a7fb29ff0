"""Prompts with images: tokens from the heads of the files at the start, pixels when they are asked for."""

import importlib.util
import io
import pickle

import numpy as np
import pytest

from rltrain.data.rows import read_rows

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from rltrain.data.chat import ChatEncoder
from rltrain.data.images import SLOT
from rltrain.data.prompts import encode_prompts
from tests.tiny_vision import FAMILIES, IMAGE, picture, save_tiny_vision_model


def png(width: int, height: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    picture(width, height, seed).save(file, "PNG")
    return file.getvalue()


# Texts with slots, and images.
PROMPTS = [
    (f"1+{SLOT}2{SLOT}=?", [png(60, 60), png(160, 60, 1)]),
    ("3+4=?", []),
    (SLOT, [png(60, 120, 2)]),
    (f"4 5 6 {SLOT}", [png(300, 90, 3)]),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        family: str(save_tiny_vision_model(tmp_path_factory.mktemp(family), family, tied=True)) for family in FAMILIES
    }


@pytest.fixture(params=FAMILIES)
def folder(request, folders) -> str:
    return folders[request.param]


@pytest.fixture
def file(tmp_path, write, good_row) -> str:
    rows = [
        good_row(
            number,
            prompt=[{"role": "user", "content": text}],
            images=[{"bytes": each, "path": None} for each in images],
        )
        for number, (text, images) in enumerate(PROMPTS)
    ]
    return str(write(tmp_path / "train.parquet", rows))


def test_a_store_makes_pixels_when_asked(folder, file):
    encoder = ChatEncoder(folder)
    store = encode_prompts(read_rows(file), encoder, 500)
    data = pickle.dumps(store)
    assert len(data) < 4000 + store.values.nbytes
    again = pickle.loads(data)
    for i, (text, images) in enumerate(PROMPTS):
        found, expected = again.encoded(i), encoder.encode_prompt([{"role": "user", "content": text}], images)
        assert found.tokens.tolist() == expected.tokens.tolist() == store.prompt(i).tolist()
        assert store.num_images[i] == len(images)
        assert store.image_tokens[i] == np.count_nonzero(found.tokens == IMAGE)
        assert store.image_rows[i] == (found.images.num_rows.sum() if images else 0)
        if images:
            assert np.array_equal(found.images.pixel_values, expected.images.pixel_values)
