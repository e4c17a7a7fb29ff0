"""Images of texts, before any model sees them: where they stand in a conversation, opened, bounded and numbered.

Filter, rollout and training must see the same pixels and the same places. So an image is opened and scaled here once,
and everything else takes what this returns. Pixel bounds scale the image itself, whichever processor follows: engines
with a processor of their own then need not be told of them. Left out: videos.
"""

from __future__ import annotations

import math
import re
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import numpy as np

from rltrain.base.errors import DataError
from rltrain.base.image_files import begins_as_image, file_bytes, reading
from rltrain.config.schema.families import FAMILIES, Family, family

# What stands for an image in the text of a row, as in verl's files.
SLOT = "<image>"
_VIDEO_SLOT = "<video>"
# A file of a few kilobytes can claim to be gigabytes of pixels.
_MOST_PIXELS = 1 << 26
# Of all images of a row. An image counts as at least so many.
MOST_ROW_PIXELS, LEAST_PIXELS = 1 << 28, 1 << 10
# A crafted file makes Pillow warn megabytes.
warnings.filterwarnings("ignore", module=r"PIL\.")
# The same for Pillow, which would start Ghostscript for EPS.
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
# Of EXIF: from the fifth value on, width and height are exchanged. In a PNG it may stand behind the pixels.
_ORIENTATION, _FIRST_TURNED = 0x0112, 5
_MARKS_OF_ORIENTATION = (b"eXIf", b"exif", b"adobe.xmp")


def family_of(model_type: str, has_tower: bool = True) -> Family:
    """The family of a configuration. Raises DataError with the reason where its images cannot be trained on."""
    entry = family(model_type)
    if entry.images:
        return entry
    why = entry.why_no_images if has_tower else "it is a model of texts alone"
    seeing = ", ".join(name for name, row in FAMILIES.items() if row.images)
    raise DataError(f"prompts with images cannot be used with {model_type}: {why}. Use {seeing}.")


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt, or of the answer behind it, as its model takes them."""

    pixel_values: np.ndarray
    """[rows, …] (float32): the patches (or tiles) of all images, one image after the other."""
    grids: np.ndarray | None
    """[images, 3] (int64): patches in time, height and width; None for a family of tiles of one size."""
    num_rows: np.ndarray
    """[images]: rows of ``pixel_values``."""
    num_tokens: np.ndarray
    """[images]: placeholders in the text."""
    places: np.ndarray
    """[sum of num_tokens]: places of the placeholders in the text."""
    positions: np.ndarray | None
    """[3, text length] (int64): positions of all its tokens, from 0; None where they count 0, 1, 2, …"""

    def __len__(self) -> int:
        return len(self.num_tokens)

    def __repr__(self) -> str:
        return f"<PromptImages: {len(self)} images, {int(self.num_tokens.sum())} tokens, {self.nbytes:,} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels."""
        return self.pixel_values.nbytes


@dataclass(frozen=True)
class EncodedPrompt:
    """tokens [n] (int32): placeholders repeated for as many tokens as each image takes. A prompt, or its beginning."""

    tokens: np.ndarray
    images: PromptImages | None = None

    @property
    def position_shift(self) -> int:
        """How far the positions of an answer are from its places."""
        return answer_position(self.images, len(self.tokens)) - len(self.tokens)

    @property
    def image_end(self) -> int:
        """Where the tokens of the last image end; 0 without images."""
        return int(self.images.places[-1]) + 1 if self.images else 0

    def until(self, stop: int) -> EncodedPrompt:
        """The first tokens, all images among them."""
        images = self.images
        if images is not None and images.positions is not None:
            images = replace(images, positions=images.positions[:, :stop])
        return EncodedPrompt(self.tokens[:stop], images)

    def followed_by(self, other: EncodedPrompt) -> EncodedPrompt:
        """This text and behind it ``other``, with the images of both."""
        tokens = np.concatenate([self.tokens, other.tokens])
        having = [text.images for text in (self, other) if text.images is not None]
        if not having:
            return EncodedPrompt(tokens)
        positions = None
        if any(images.positions is not None for images in having):
            start = answer_position(self.images, len(self.tokens))
            positions = np.concatenate([self._positions(), start + other._positions()], axis=1)
        places = [text.images.places + start for text, start in ((self, 0), (other, len(self.tokens))) if text.images]
        grids = [images.grids for images in having if images.grids is not None]
        images = PromptImages(
            _one_array([images.pixel_values for images in having]),
            _one_array(grids) if grids else None,
            _one_array([images.num_rows for images in having]),
            _one_array([images.num_tokens for images in having]),
            np.concatenate(places),
            positions,
        )
        return EncodedPrompt(tokens, images)

    def _positions(self) -> np.ndarray:
        """[3, n]."""
        of_images = None if self.images is None else self.images.positions
        count = np.arange(len(self.tokens))
        return np.broadcast_to(count, (3, len(count))) if of_images is None else of_images


def _one_array(arrays: Sequence[np.ndarray]) -> np.ndarray:
    # Pixels are large, and most often one of two texts has some.
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


# -- conversations -----------------------------------------------------------------------------------------------------


def with_parts(messages: Sequence[Mapping[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """The messages with ``<image>`` in a text as parts of its content, as chat templates take them.

    A message without images stays as it is. Raises DataError where slots and images do not fit.
    """
    converted_messages: list[dict[str, Any]] = []
    num_slots = 0
    for message in messages:
        content = message.get("content")
        if num_images and isinstance(content, str) and _VIDEO_SLOT in content:
            raise DataError(f"the prompt has a place for a video ({_VIDEO_SLOT}): videos are not in this version.")
        parts = _parts(content) if isinstance(content, str) else [_part(entry) for entry in content or ()]
        slots = sum(part["type"] == "image" for part in parts)
        num_slots += slots
        converted_messages.append(
            {**message, "content": parts} if slots or not isinstance(content, str) else dict(message)
        )
    if num_slots != num_images:
        hint = "" if num_images else " Does data.image_key name the column of its images?"
        raise DataError(
            f"the prompt has {num_slots} places for images ({SLOT}) and the row has {num_images} images.{hint}"
        )
    return converted_messages


def has_slot(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has a place for an image."""
    contents = [message.get("content") or "" for message in messages]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    return any(isinstance(content, str) and SLOT in content for content in contents) or any(
        isinstance(part, Mapping) and part.get("type") == "image" for part in parts
    )


def without_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with texts alone, as a model that sees no images reads them: an image is ``<image>``."""
    return [{**message, "content": _flat(message.get("content"))} for message in messages]


def _flat(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(SLOT if part["type"] == "image" else part["text"] for part in map(_part, content or ()))


def _parts(text: str) -> list[dict[str, Any]]:
    pieces = [piece for piece in re.split(f"({SLOT})", text) if piece]
    return [{"type": "image"} if piece == SLOT else {"type": "text", "text": piece} for piece in pieces]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": part.get("text") or ""}
    if kind != "image":
        raise DataError(f"a message holds a part of type {kind!r}; known are text and image.")
    return {"type": "image"}


# -- pixels ------------------------------------------------------------------------------------------------------------


def open_image(image: Any) -> Any:
    """A PIL image in RGB, upright, whatever is see-through in white. image: {"bytes", "path"}, bytes, a path or a PIL
    image. Raises DataError for what cannot be read or is larger than any image.
    """
    with _reading():
        from PIL import Image, ImageOps

        opened = image if isinstance(image, Image.Image) else _opened(file_bytes(image))
        _refuse_bomb(opened)
        opened = _of_eight_bits(ImageOps.exif_transpose(opened), opened.format)
        if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
            opened = opened.convert("RGBA")
            # Black lines on nothing are a usual figure; on black they would be gone.
            white = Image.new("RGBA", opened.size, (255, 255, 255, 255))
            opened = Image.alpha_composite(white, opened)
        return opened.convert("RGB")


def _of_eight_bits(image: Any, kind: str | None) -> Any:
    """Greys of 16 bits as 8 bits; Pillow would make them white. kind: of the file."""
    # Older Pillows open a PNG of 16 bits as "I".
    if image.mode == "F" or (image.mode == "I" and kind != "PNG"):
        raise DataError(
            f"its greys are numbers of 32 bits (Pillow's mode {image.mode!r}), and nothing says which of them is "
            "white: save it as a PNG of 8 or 16 bits."
        )
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    greys = np.round(values / 257)
    greys[values == image.info.get("transparency")] = 255  # see-through
    return _pillow().fromarray(greys.astype(np.uint8))


def measured(image: Any) -> tuple[int, int]:
    """Width and height of what `open_image` makes of a file, (0, 0) without Pillow. Raises DataError as it does.

    They stand in the head of the file; the rest is looked through for damage. Only where neither checksums nor the end
    of the file tell that it is whole, or where it may lie on its side, the pixels are decoded.
    """
    with _reading():
        data = file_bytes(image)
        pillow = _pillow()
        if pillow is None:
            if not begins_as_image(data):
                raise DataError("it does not begin as a file of an image does.")
            return (0, 0)
        with _opened(data) as opened:
            _refuse_bomb(opened)
            width, height = opened.size
            if not _is_whole(opened, data):
                return open_image(data).size
            # A PNG with an orientation was decoded.
            turned = opened.format != "PNG" and opened.getexif().get(_ORIENTATION, 1) >= _FIRST_TURNED
        return (height, width) if turned else (width, height)


def _is_whole(opened: Any, data: bytes) -> bool:
    if opened.format == "PNG":
        if any(mark in data for mark in _MARKS_OF_ORIENTATION):
            return False
        opened.verify()
        return True
    if opened.format == "JPEG":
        return data.rstrip(b"\0\r\n").endswith(b"\xff\xd9")
    return opened.format == "WEBP" and int.from_bytes(data[4:8], "little") + 8 <= len(data)


def _opened(data: bytes) -> Any:
    return _pillow().open(BytesIO(data), formats=_FORMATS)


def _pillow() -> Any:
    """PIL.Image, or None."""
    try:
        from PIL import Image
    except ImportError:
        return None
    return Image


@contextmanager
def _reading() -> Iterator[None]:
    bomb = getattr(_pillow(), "DecompressionBombError", ValueError)
    with reading(SyntaxError, struct.error, bomb):
        try:
            yield
        except ImportError as error:
            raise DataError("prompts have images, which Pillow reads: pip install pillow torchvision.") from error


def _refuse_bomb(opened: Any) -> None:
    if opened.width * opened.height > _MOST_PIXELS:
        raise DataError(
            f"it is {opened.width} x {opened.height}, more than {_MOST_PIXELS:,} pixels: a decompression bomb, or "
            "an image to be scaled down before training."
        )


def blank_image() -> Any:
    """A small image with nothing in it."""
    from PIL import Image

    return Image.new("RGB", (64, 64))


def bounded_size(size: tuple[int, int], min_pixels: int | None, max_pixels: int | None, unit: int) -> tuple[int, int]:
    """Width and height scaled, their proportions kept, to at least ``min_pixels`` and at most ``max_pixels`` (None: no
    bound).

    unit: pixels of the edge of one token; a scaled edge is a multiple of it, and what would be out of bounds when
    rounded to it is scaled as well. The formula is that of Qwen2-VL's processor, which then finds nothing to do.
    """
    width, height = size
    rounded = [max(unit, round(edge / unit) * unit) for edge in size]
    area = math.prod(rounded)
    if max_pixels is not None and area > max_pixels:
        by = math.sqrt(width * height / max_pixels)
        rounded = [max(unit, math.floor(edge / by / unit) * unit) for edge in size]
    elif min_pixels is not None and area < min_pixels:
        by = math.sqrt(min_pixels / (width * height))
        rounded = [math.ceil(edge * by / unit) * unit for edge in size]
    else:
        return size
    return rounded[0], rounded[1]


def bounded(image: Any, min_pixels: int | None, max_pixels: int | None, unit: int) -> Any:
    """A PIL image scaled to its `bounded_size`."""
    size = bounded_size(image.size, min_pixels, max_pixels, unit)
    return image if size == image.size else image.resize(size, resample=3)  # bicubic, as the processors do


# -- places and positions ----------------------------------------------------------------------------------------------


def runs(tokens: np.ndarray, placeholder: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of every run of ``placeholder`` in ``tokens`` [n]."""
    is_one = np.concatenate([[False], tokens == placeholder, [False]])
    edges = np.flatnonzero(is_one[1:] != is_one[:-1])
    return edges[::2], edges[1::2] - edges[::2]


def one_each(tokens: np.ndarray, placeholder: int) -> np.ndarray:
    """``tokens`` with every run of ``placeholder`` shortened to one."""
    again = np.concatenate([[False], (tokens[1:] == placeholder) & (tokens[:-1] == placeholder)])
    return tokens[~again]


def mrope_positions(tokens: np.ndarray, placeholder: int, grids: np.ndarray, merge: int) -> np.ndarray:
    """Positions [3, n] of a prompt in time, height and width, as `get_rope_index` of Qwen2-VL and its successors.

    A text goes on by one in all rows. An image's tokens lie on its grid behind the text in front of it, and the text
    behind goes on after the longer edge. grids [images, 3], in patches; merge: edge of a token, in patches. An answer
    goes on at the largest position plus one (`answer_position`).
    """
    starts, lengths = runs(tokens, placeholder)
    positions = np.zeros((3, len(tokens)), dtype=np.int64)
    end = position = 0
    for start, length, grid in zip(starts.tolist(), lengths.tolist(), grids.tolist(), strict=True):
        positions[:, end:start] = position + np.arange(start - end)
        position += start - end
        shape = (grid[0], grid[1] // merge, grid[2] // merge)
        positions[:, start : start + length] = position + np.indices(shape).reshape(3, -1)
        position += max(shape[1:])
        end = start + length
    positions[:, end:] = position + np.arange(len(tokens) - end)
    return positions


def answer_position(images: PromptImages | None, prompt_length: int) -> int:
    """The position of the first token of an answer to a prompt."""
    if images is None or images.positions is None:
        return prompt_length
    return int(images.positions.max()) + 1
