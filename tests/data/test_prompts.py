"""Prompts with images: tokens come from the file headers at the start, and pixels are read when needed."""

import importlib.util
import io
import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rltrain.common.errors import DataError
from rltrain.config.schema import DataConfig
from rltrain.data import stored_images as reading
from rltrain.data.checks import Keys
from rltrain.data.custom import custom_rows
from rltrain.data.images import image_size, open_image
from rltrain.data.rows import read_rows

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from rltrain.data.chat import ChatEncoder
from rltrain.data.images import SLOT
from rltrain.data.prompts import check_limit_images, encode_prompts
from tests.tiny_vision import FAMILIES, IMAGE, picture, save_tiny_families


def as_file(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, seed: int = 0) -> bytes:
    return as_file(picture(width, height, seed))


# Texts with slots, and images.
PROMPTS = [
    (f"1+{SLOT}2{SLOT}=?", [png(60, 60), png(160, 60, 1)]),
    ("3+4=?", []),
    (SLOT, [png(60, 120, 2)]),
    (f"4 5 6 {SLOT}", [png(300, 90, 3)]),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_tiny_families(tmp_path_factory)


@pytest.fixture(params=FAMILIES)
def folder(request, folders) -> str:
    return folders[request.param]


@pytest.fixture
def make(tmp_path, write, good_row):
    """Write rows of texts and images (entries of the column); return the path."""

    def made(prompts, column="images", name="train"):
        rows = [
            good_row(number, prompt=[{"role": "user", "content": text}], **{column: images})
            for number, (text, images) in enumerate(prompts)
        ]
        return write(tmp_path / f"{name}.parquet", rows)

    return made


def inside(*files: bytes) -> list[dict]:
    return [{"bytes": file, "path": None} for file in files]


@pytest.fixture
def file(make) -> str:
    return make([(text, inside(*images)) for text, images in PROMPTS])


def test_more_images_than_allowed_are_an_error(folder, file):
    rows = read_rows(file)
    store = encode_prompts(rows, ChatEncoder(folder), 500)
    most = int(store.num_images.max())
    check_limit_images(rows, store, most)
    check_limit_images(rows, store, None)
    with pytest.raises(DataError, match=rf"(?s)limit_images={most - 1}.*train.parquet' row 0: {most} images"):
        check_limit_images(rows, store, most - 1)


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


# -- counting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [(None, None), (5000, 9000)])
def test_tokens_counted_from_sizes_are_the_processors(folder, bounds):
    encoder = ChatEncoder(folder, min_pixels=bounds[0], max_pixels=bounds[1])
    random = np.random.default_rng(0)
    for _ in range(12):
        sizes = [tuple(edges) for edges in random.integers(8, 500, (2, 2)).tolist()]
        counted = encoder.expand(
            [[{"role": "user", "content": f"1{SLOT}2{SLOT}"}]], [[encoder.bounded_size(size) for size in sizes]]
        )
        images = encoder.open_images([Image.new("RGB", size) for size in sizes])
        # Raises if an image has a different number of tokens or rows.
        found = encoder.with_pixels(np.array(counted[0][0]), images)
        assert counted[0][1:] == (found.images.num_rows.sum(), found.images.num_tokens.sum())


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_image_sizes_from_headers_equal_opened_sizes():
    wide = picture(40, 24)
    files = [as_file(wide, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")]
    files += [
        as_file(wide, kind, exif=turned(each)) for kind in ("PNG", "JPEG", "WEBP", "TIFF") for each in range(1, 9)
    ]
    files += [as_file(wide.convert(mode)) for mode in ("RGBA", "LA", "L", "P", "1", "I;16")]
    files += [as_file(wide, "JPEG") + bytes(9), as_file(wide, "JPEG", progressive=True)]
    assert [image_size({"bytes": file}) for file in files] == [open_image(file).size for file in files]


# -- pictures that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entry", "said"), [
    *[({"bytes": as_file(picture(40, 24), kind)[:-9], "path": None}, "it cannot be read")
      for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")],
    ({"bytes": b"no picture", "path": None}, "it cannot be read: cannot identify image file"),
    ({"bytes": None, "path": "gone.png"}, "No such file or directory: '.*/gone.png'"),
    ({"bytes": None, "path": "http://host/a.png"}, "a web address"),
    ({"bytes": None, "path": None}, "bytes"),
])  # fmt: skip
def test_bad_image_error_names_file_row_and_field(make, entry, said):
    path = make([("1", []), (SLOT * 2, [*inside(png(9, 9)), entry])])
    with pytest.raises(DataError, match=rf"1 bad row:\n  '{path}' row 1: field 'images\[1\]': .*{said}"):
        read_rows(path)


def test_a_decompression_bomb_is_refused(make):
    bomb = as_file(Image.new("1", (9000, 9000)))
    assert len(bomb) < 20_000
    with pytest.raises(DataError, match=r"row 0: field 'images\[0\]': it is 9000 x 9000, more than .*bomb"):
        read_rows(make([(SLOT, inside(bomb))]))


def test_many_images_below_the_limit_are_too_many_for_a_row(make):
    image = inside(as_file(Image.new("1", (8000, 8000))))
    with pytest.raises(DataError, match=r"row 1: field 'images\[4\]': the images up to here have 320,000,000 pixels"):
        read_rows(make([(SLOT, image), (SLOT * 5, [*image] * 5)]))


def test_warnings_of_a_crafted_image_are_not_repeated(tmp_path):
    """A TIFF with thousands of broken tags, read in a process that shows warnings."""
    tags = b"".join(struct.pack("<HHII", 40_000 + tag, 3, 9, 1 << 30) for tag in range(2000))
    (tmp_path / "a.tif").write_bytes(b"II*\0" + struct.pack("<IH", 8, 2000) + tags + bytes(4))
    code = "import sys; from rltrain.data.images import open_image; open_image(sys.argv[1])"
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.tif")], capture_output=True, text=True, check=False
    )
    assert "DataError" in process.stderr
    assert "UserWarning" not in process.stderr


def test_a_column_of_another_kind_is_refused(make):
    with pytest.raises(DataError, match="column 'images' is list<element: int64>; it must hold images"):
        read_rows(make([("1", [3])]))
    with pytest.raises(DataError, match=r"has no column data.image_key='pics'; it has .*images"):
        read_rows(make([("1", [])]), keys=Keys(image="pics"))
    with pytest.raises(DataError, match="column 'videos' is list<element: int64>; it must hold videos"):
        read_rows(make([("1", [3])], column="videos"))


def test_prompts_that_do_not_fit_their_images_name_the_row(folders, make, tiny_model):
    one = inside(png(60, 60))
    for prompts, model, said in (
        ([(SLOT, one), (f"{SLOT} {SLOT}", one)], folders["qwen2_vl"], "the prompt has 2 slots"),
        ([(SLOT, one), (SLOT, [])], folders["qwen2_vl"], "the prompt has 1 slots .* 0 images"),
        ([("1", []), (SLOT, one)], tiny_model, "holds an image: .*cannot be used with qwen3: it is a text-only model"),
    ):
        path = make(prompts)
        with pytest.raises(DataError, match=rf"^'{path}' row 1:? {said}"):
            encode_prompts(read_rows(path), ChatEncoder(str(model)), 500)


@pytest.mark.parametrize("content", [f"1{SLOT}", [{"type": "image"}, {"type": "text", "text": "1"}]])
@pytest.mark.parametrize("column", ["image", "images"])
def test_vision_model_without_images_is_rejected(folders, tmp_path, write, good_row, column, content):
    # In a column that is not configured, or in none.
    images = inside(png(60, 60)) if column == "image" else None
    prompts = [[{"role": "user", "content": content}], [{"role": "user", "content": content}]]
    path = write(tmp_path / "r.parquet", [good_row(prompt=prompt, **{column: images}) for prompt in prompts])
    with pytest.raises(
        DataError, match=rf"(?s)'{path}' row 0: the prompt has 1 .* 0 images. .*data.image_key.* row 1: "
    ):
        encode_prompts(read_rows(path), ChatEncoder(folders["qwen2_vl"]), 500)


# -- where pictures are ------------------------------------------------------------------------------------------------


def test_paths_are_relative_to_the_folder_of_the_file(folders, make, tmp_path, monkeypatch):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(png(60, 60))
    monkeypatch.chdir("/")
    names = ["pictures/a.png", str(tmp_path / "pictures/a.png"), f"file://{tmp_path}/pictures/a.png"]
    forms = (
        [[{"bytes": None, "path": name}] for name in names],
        [[name] for name in names],
        names,
        [[{"image": names[0]}]],
    )
    encoder = ChatEncoder(folders["qwen2_5_vl"])
    expected = encoder.encode_prompt([{"role": "user", "content": SLOT}], [png(60, 60)])
    for number, entries in enumerate(forms):
        rows = read_rows(make([(SLOT, entry) for entry in entries], "pic", f"{number}"), keys=Keys(image="pic"))
        store = encode_prompts(rows, encoder, 500)
        for i in range(len(entries)):
            assert np.array_equal(store.encoded(i).images.pixel_values, expected.images.pixel_values)
    store.stored_images.check_files_exist()
    (tmp_path / f"{number}.parquet").unlink()
    with pytest.raises(DataError, match=r"3\.parquet' is not on node .*Every node reads the images"):
        store.stored_images.check_files_exist()


def test_changed_image_error_names_the_row(folders, make, tmp_path):
    (tmp_path / "a.png").write_bytes(png(60, 60))
    path = make([(SLOT, [{"path": "a.png"}])])
    store = encode_prompts(read_rows(path), ChatEncoder(folders["qwen2_vl"]), 500)
    before = read_rows(path).fingerprint()
    # They have the same size, and so the same number of tokens.
    (tmp_path / "a.png").write_bytes(png(60, 60, 1))
    with pytest.raises(DataError, match=rf"^'{path}' row 0: the images have changed since"):
        store.encoded(0)
    assert read_rows(path).fingerprint() != before
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=rf"^'{path}' row 0: image 1 of 1: it cannot be read: .*a.png"):
        store.encoded(0)
    os.unlink(path)
    with pytest.raises(DataError, match=rf"^'{path}' row 0: its images cannot be read any more"):
        store.encoded(0)


def test_a_store_reads_the_rows_that_were_kept(folders, make):
    long = (SLOT + "9" * 400, inside(png(60, 60)))
    one = make([long, (SLOT, inside(png(60, 100, 1))), ("1", [])], name="one")
    two = make([long, long, (SLOT + "2", inside(png(60, 160, 2)))], name="two")
    encoder = ChatEncoder(folders["qwen2_vl"])
    found = read_rows([one, two], max_rows=5, seed=3)
    store = encode_prompts(found, encoder, 100, filter_overlong=True)
    rows = found.select(store.row_index)
    assert store.num_dropped > 0
    for i in range(len(store)):
        images = [image["bytes"] for image in rows.images(i)]
        expected = encoder.encode_prompt(rows[i].prompt, images)
        assert store.encoded(i).tokens.tolist() == expected.tokens.tolist()
        if images:
            assert np.array_equal(store.encoded(i).images.pixel_values, expected.images.pixel_values)


# The same image in every form that a dataset may return, and the messages.
OWN = """
import pathlib

import numpy as np
from PIL import Image

def made(data_files):
    file = data_files[0].rpartition("/")[0] + "/a.png"
    slots = [{"role": "user", "content": "1<image>2<image>"}]
    with Image.open(file) as opened:
        picture, data = opened.copy(), pathlib.Path(file).read_bytes()
    parts = [{"type": "text", "text": "1"}, {"type": "image", "image": file}, {"type": "text", "text": "2"},
             {"type": "image", "image": picture}]
    row = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "1"}, "extra_info": {}}
    return [
        row | {"raw_prompt": slots, "multi_modal_data": {"image": [picture, picture]}},
        row | {"raw_prompt": np.array(slots, dtype=object), "images": [data, {"path": "a.png"}]},
        row | {"prompt": [{"role": "user", "content": parts}]},
    ]
"""


def test_custom_dataset_images_in_any_form(folders, tmp_path):
    (tmp_path / "a.png").write_bytes(png(60, 60))
    (tmp_path / "mine.py").write_text(OWN)
    rows = custom_rows(DataConfig(custom_cls=f"{tmp_path}/mine.py:made"), [f"{tmp_path}/a.jsonl"], None, -1)
    encoder = ChatEncoder(folders["qwen2_5_vl"])
    store = pickle.loads(pickle.dumps(encode_prompts(rows, encoder, 500)))
    expected = encoder.encode_prompt([{"role": "user", "content": f"1{SLOT}2{SLOT}"}], [png(60, 60)] * 2)
    assert store.num_images.tolist() == [2, 2, 2]
    for i in range(3):
        found = store.encoded(i)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert np.array_equal(found.images.pixel_values, expected.images.pixel_values)
    # Workers get rows and prompts; only one of these contains the images.
    bare = rows.without_images()
    assert list(bare) == list(rows)
    assert len(pickle.dumps(bare)) < len(pickle.dumps(rows)) - 2 * len(png(60, 60))
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"mine.py:made of .*' row 1: image 2 of 2: it cannot be read: .*/a.png"):
        store.encoded(1)


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_the_filter_counts_the_tokens_of_images(folders, make):
    path = make([(SLOT, inside(png(60, 60))), (SLOT, inside(png(160, 160))), ("1" * 9, [])])
    rows, encoder = read_rows(path), ChatEncoder(folders["qwen2_5_vl"])
    assert encode_prompts(rows, encoder, 20, filter_overlong=True).row_index.tolist() == [0, 2]
    # Bounds apply before the filter.
    small = ChatEncoder(folders["qwen2_5_vl"], max_pixels=56 * 56)
    assert encode_prompts(rows, small, 20, filter_overlong=True).row_index.tolist() == [0, 1, 2]


@pytest.mark.parametrize("how", ["error", "left"])
def test_prompt_with_images_is_never_truncated(folders, make, how):
    path = make([(SLOT, inside(png(160, 160))), ("1", [])])
    with pytest.raises(DataError, match=r"1 of 2 prompts are longer .* is not cut\).(?s:.*)row 0: 29 tokens"):
        encode_prompts(read_rows(path), ChatEncoder(folders["qwen2_vl"]), 20, truncation=how)


# -- cost --------------------------------------------------------------------------------------------------------------


def test_image_memory_does_not_grow_with_the_file(make, monkeypatch):
    monkeypatch.setattr(reading, "CACHE_BYTES", 4 << 20)
    file = png(200, 200)  # 120 kB
    path = make([(SLOT, inside(file))] * 320)
    pq.write_table(pq.read_table(path), path, row_group_size=8, use_dictionary=False)
    pool, before = pa.system_memory_pool(), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        start = pool.bytes_allocated()
        rows = read_rows(path)
        pictures = rows.stored_images()
        assert all(len(pictures.of(i)) == 1 for i in np.random.default_rng(0).permutation(len(rows)))
        assert pool.max_memory() - start < 32 * len(file) + (4 << 20) < 80 * len(file)
    finally:
        pa.set_memory_pool(before)
    assert len(pickle.dumps(rows)) < 320 * 400


def test_large_row_groups_are_named_with_their_cure(make, monkeypatch, caplog):
    path = make([(SLOT, inside(png(60, 60, seed))) for seed in range(4)])
    monkeypatch.setattr(reading, "CACHE_BYTES", 20 << 10)
    read_rows(path)
    assert "column 'images' in one row group, and every process" in caplog.text
    assert "row_group_size=32" in caplog.text
    caplog.clear()
    monkeypatch.setattr(reading, "MAX_GROUP_BYTES", 21 << 10)
    with pytest.raises(DataError, match=f"'{path}' holds .*, more than can be read.*row_group_size=32"):
        read_rows(path)
    pq.write_table(pq.read_table(path), path, row_group_size=1)
    read_rows(path)
    assert not caplog.text
