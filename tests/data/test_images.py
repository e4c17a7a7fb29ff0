"""Conversations with images as tokens, pixels and positions, compared with transformers' processors and models."""

import importlib.util
import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from rltrain.common.errors import DataError
from rltrain.data.images import (
    SLOT,
    EncodedPrompt,
    answer_position,
    bounded,
    family_of,
    image_size,
    open_image,
    with_parts,
)
from tests.images import RED

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from rltrain.data.chat import ChatEncoder
from tests.tiny_vision import FAMILIES, IMAGE, picture, save_tiny_families

SMALL, WIDE, TALL = picture(60, 60), picture(160, 60, seed=1), picture(60, 120, seed=2)
# Texts with slots, and images: several, none, one at the end, one alone.
PROMPTS = [
    ([{"role": "user", "content": f"1+{SLOT}2{SLOT}=?"}], [SMALL, WIDE]),
    ([{"role": "user", "content": "3+4=?"}], []),
    ([{"role": "user", "content": f"{SLOT}"}], [TALL]),
    ([{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "3"},
      {"role": "user", "content": f"4 5 6 {SLOT}"}], [WIDE]),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_tiny_families(tmp_path_factory)


@pytest.fixture(params=FAMILIES)
def folder(request, folders) -> str:
    return folders[request.param]


def parts(messages):
    """Return the content in the form that transformers' templates need, written by hand."""
    found = []
    for message in messages:
        pieces = message["content"].split(SLOT)
        content = [{"type": "text", "text": pieces[0]}]
        for piece in pieces[1:]:
            content += [{"type": "image"}, {"type": "text", "text": piece}]
        found.append({"role": message["role"], "content": content})
    return found


def by_transformers(folder: str, messages, images) -> dict:
    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template(parts(messages), tokenize=False, add_generation_prompt=True)
    made = {"images": images} if images else {}
    return processor(text=[text], return_tensors="pt", return_mm_token_type_ids=True, **made)


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_tokens_and_pixels_are_those_of_the_processor(folder, number):
    messages, images = PROMPTS[number]
    expected, found = by_transformers(folder, messages, images), ChatEncoder(folder).encode_prompt(messages, images)
    assert found.tokens.tolist() == expected["input_ids"][0].tolist()
    assert found.tokens.dtype == np.int32
    if not images:
        assert found.images is None
        return
    assert np.array_equal(found.images.pixel_values, expected["pixel_values"].numpy())
    assert found.images.pixel_values.dtype == np.float32
    assert len(found.images) == len(images)
    assert found.images.num_rows.sum() == len(found.images.pixel_values)
    assert found.images.places.tolist() == [place for place, token in enumerate(found.tokens) if token == IMAGE]
    if "image_grid_thw" in expected:
        assert found.images.grids.tolist() == expected["image_grid_thw"].tolist()
        assert found.images.num_tokens.tolist() == (expected["image_grid_thw"].prod(-1) // 4).tolist()


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_positions_of_prompt_and_answer_are_the_models(folder, number):
    messages, images = PROMPTS[number]
    model = AutoModelForImageTextToText.from_pretrained(folder).model
    expected, found = by_transformers(folder, messages, images), ChatEncoder(folder).encode_prompt(messages, images)
    prompt, answer = len(found.tokens), 5
    if not images or not hasattr(model, "get_rope_index"):
        assert found.images is None or found.images.positions is None
        assert answer_position(found.images, prompt) == prompt
        return
    tokens = torch.cat([expected["input_ids"], torch.full((1, answer), 7)], 1)
    kinds = torch.cat([expected["mm_token_type_ids"], torch.zeros(1, answer, dtype=torch.int)], 1)
    positions = model.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=expected["image_grid_thw"])[0]
    assert found.images.positions.tolist() == positions[:, 0, :prompt].tolist()
    start = answer_position(found.images, prompt)
    assert positions[:, 0, prompt:].tolist() == [[*range(start, start + answer)]] * 3


# -- slots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "count", "message"), [
    (f"1{SLOT}", 2, "1 slots for images .<image>. and the row has 2 images"),
    ("1", 1, "0 slots"),
    (f"{SLOT}{SLOT}", 0, "2 slots"),
    (f"<video>{SLOT}", 1, "1 slots for videos .<video>. and the row has 0 videos"),
    ([{"type": "video"}], 0, "1 slots for videos"),
    ([{"type": "audio"}], 0, "part of type 'audio'"),
])  # fmt: skip
def test_slots_and_images_that_do_not_fit_are_an_error(content, count, message):
    with pytest.raises(DataError, match=message):
        with_parts([{"role": "user", "content": content}], count)


def test_a_placeholder_in_the_text_is_no_image(folder):
    messages = [{"role": "user", "content": f"1<|image_pad|>{SLOT}"}]
    with pytest.raises(DataError, match=r"2 times .*for 1 images"):
        ChatEncoder(folder).encode_prompt(messages, [SMALL])


def test_a_model_of_text_and_a_family_unknown_are_refused(tiny_model):
    with pytest.raises(DataError, match=r"cannot be used with qwen3: .* Use qwen2_vl, qwen2_5_vl"):
        ChatEncoder(str(tiny_model)).encode_prompt([{"role": "user", "content": SLOT}], [SMALL])
    with pytest.raises(DataError, match="gemma3: the tokens of an image attend to each other in both directions"):
        family_of("gemma3")


# -- pixels ------------------------------------------------------------------------------------------------------------


def as_file(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_image_as_bytes_path_or_pil(tmp_path):
    (tmp_path / "a.png").write_bytes(as_file(SMALL))
    path, data = tmp_path / "a.png", as_file(SMALL)
    forms = [SMALL, data, {"bytes": data, "path": None}, {"bytes": None, "path": path}, str(path)]
    assert all(np.array_equal(np.asarray(open_image(form)), np.asarray(SMALL)) for form in forms)


def test_transparency_is_white_and_images_are_upright():
    drawing = Image.new("RGBA", (4, 2), (0, 0, 0, 0))
    drawing.putpixel((0, 0), (0, 0, 0, 255))
    found = np.asarray(open_image(as_file(drawing)))
    assert found[0, 0].tolist() == [0, 0, 0]
    assert found[1, 3].tolist() == [255, 255, 255]
    exif = Image.Exif()
    exif[0x0112] = 6  # must be rotated by 90 degrees
    assert open_image(as_file(picture(8, 4), "JPEG", exif=exif)).size == (4, 8)
    assert open_image(as_file(Image.new("L", (3, 3), 7))).getpixel((0, 0)) == (7, 7, 7)


def test_a_file_that_starts_a_program_is_not_opened(tmp_path, monkeypatch):
    """Pillow starts Ghostscript for EPS files."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    figure = as_file(Image.new("RGB", (3, 3)), "EPS")
    for look in (open_image, image_size):
        with pytest.raises(DataError, match="cannot identify image file"):
            look(figure)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("order", ["<", ">"])
def test_greys_of_16_bits_keep_their_shades(order):
    greys = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    found = np.asarray(open_image(as_file(Image.fromarray(greys.astype(f"{order}u2")))))
    assert np.array_equal(found, np.repeat(greys[..., None] // 257, 3, axis=-1))
    with pytest.raises(DataError, match="it is unknown which value is white: save it as a PNG of 8 or 16"):
        open_image(as_file(Image.new("F", (3, 3), 7), "TIFF"))


def bomb() -> bytes:
    """Return a PNG of a few hundred bytes that declares 30,000 x 30,000 pixels."""
    head = RED.index(b"IHDR") + 4
    sizes = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return RED[:head] + sizes + struct.pack(">I", zlib.crc32(b"IHDR" + sizes)) + RED[head + 17 :]


@pytest.mark.parametrize(("image", "message"), [
    (b"no picture", "image 2 of 2: it cannot be read"),
    (as_file(SMALL)[:200], "image 2 of 2: it cannot be read"),
    ({"bytes": None, "path": "no/such.png"}, "image 2 of 2: it cannot be read: .*no/such.png"),
    ({"bytes": None, "path": None}, "bytes"),
    (bomb(), "image 2 of 2: it .*decompression bomb"),
    (Image.new("RGB", (9000, 9000)), "9000 x 9000, more than .* decompression bomb"),
    (Image.new("RGB", (4000, 4)), "rejects the images: absolute aspect ratio"),
])  # fmt: skip
def test_unusable_image_error(folders, image, message):
    messages = [{"role": "user", "content": SLOT * 2}]
    with pytest.raises(DataError, match=message):
        ChatEncoder(folders["qwen2_5_vl"]).encode_prompt(messages, [SMALL, image])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_a_text_behind_another_has_the_images_and_positions_of_both(folders, family):
    encoder = ChatEncoder(folders[family])
    images = [picture(60, 90, 1), picture(120, 60, 2), picture(60, 60, 3)]
    ask = [{"role": "user", "content": "1<image>2<image>3"}]
    prompt, other = encoder.encode_prompt(ask, images[:2]), encoder.encode_prompt(ask[:1], images[1:])
    sampled = EncodedPrompt(np.arange(6, 11, dtype=np.int32))
    whole = prompt.followed_by(sampled).followed_by(other)
    assert whole.tokens.tolist() == [*prompt.tokens, *sampled.tokens, *other.tokens]
    expected = encoder.with_pixels(whole.tokens, encoder.open_images([*images[:2], *images[1:]]))
    for name, part in vars(expected.images).items():
        assert np.array_equal(getattr(whole.images, name), part), name
    assert whole.position_shift == expected.position_shift
    assert sampled.followed_by(sampled).images is None
    # A separate text that is continued begins at position 0, wherever it will be placed.
    assert sampled.followed_by(other).images.places.tolist() == (other.images.places + 5).tolist()


@pytest.mark.parametrize("size", [(240, 60), (60, 240)])
@pytest.mark.parametrize(("low", "high"), [(None, 60 * 60), (300 * 300, None)])
def test_a_figure_is_scaled_whole_and_never_cropped(size, low, high):
    corners = {(0, 0): (255, 0, 0), (1, 0): (0, 255, 0), (0, 1): (0, 0, 255), (1, 1): (0, 0, 0)}
    figure = Image.new("RGB", size, (255, 255, 255))
    for (right, below), color in corners.items():
        left, top = right * (size[0] - 12), below * (size[1] - 12)
        figure.paste(color, (left, top, left + 12, top + 12))
    found = bounded(figure, low, high, 28)
    assert found.size != size
    for (right, below), color in corners.items():
        at = found.getpixel((right * (found.width - 1), below * (found.height - 1)))
        assert np.abs(np.subtract(at, color)).max() < 60, (right, below)


@pytest.mark.parametrize("size", [(5, 300), (300, 5)])
def test_a_thin_figure_has_tokens_along_both_edges(folder, size):
    encoder = ChatEncoder(folder, max_pixels=56 * 56)
    images = encoder.encode_prompt([{"role": "user", "content": SLOT}], [picture(*size)]).images
    assert images.num_tokens[0] >= 4
    if images.grids is not None:
        assert images.grids[0, 1:].min() >= 2  # patches: an edge of one token is two


def test_bounds_scale_as_qwens_processor_does():
    random = np.random.default_rng(0)
    for _ in range(200):
        width, height = (int(edge) for edge in random.integers(28, 400, 2))
        low, high = 56 * 56, 28 * 28 * int(random.integers(8, 60))
        found = bounded(Image.new("RGB", (width, height)), low, high, 28).size
        expected = smart_resize(height, width, 28, low, high)
        # Sizes within the bounds are left to the processor, which rounds them.
        rounded = tuple(round(edge / 28) * 28 for edge in (height, width))
        assert found == ((width, height) if rounded == expected else expected[::-1])
