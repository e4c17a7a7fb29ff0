"""Images before any model processes them: slots in conversations, opening, scaling and positions.

Filter, rollout and training must see the same pixels and positions. Therefore an image is opened and scaled once here.
Pixel bounds scale the image itself, independently of the processor, so that engines with their own processor do not
need the bounds. Videos are in `data/media/videos.py`.
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

from rltrain.common.errors import DataError
from rltrain.common.images import begins_as_image, file_bytes, reading
from rltrain.config.schema.families import FAMILIES, Family, family

# Slots of an image and a video in the text of a row, as in verl's files.
SLOT, VIDEO_SLOT = "<image>", "<video>"
_SLOTS = {SLOT: "image", VIDEO_SLOT: "video"}
# Maximum pixels of an image, because a file of a few kilobytes can declare gigabytes of pixels.
_MOST_PIXELS = 1 << 26
# Maximum of the sum of pixels over the images of a row. Each image counts as at least LEAST_PIXELS.
MOST_ROW_PIXELS, LEAST_PIXELS = 1 << 28, 1 << 10
# Pillow's warnings are ignored, because a crafted file can cause megabytes of them.
warnings.filterwarnings("ignore", module=r"PIL\.")
# Only these formats are allowed, because Pillow would start Ghostscript for EPS.
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
# EXIF orientations from 5 on swap width and height. In a PNG the orientation may be stored after the pixels.
_ORIENTATION, _FIRST_TURNED = 0x0112, 5
_MARKS_OF_ORIENTATION = (b"eXIf", b"exif", b"adobe.xmp")


def family_of(model_type: str, has_tower: bool = True, media: str = "images") -> Family:
    """Return the family of a configuration. Raises DataError with the reason if its images cannot be trained on.

    media: "images", or "videos" for its videos.
    """
    entry = family(model_type)
    if getattr(entry, media):
        return entry
    compared = f"its {media} have not been compared with transformers'"
    why = (compared if entry.images else entry.why_no_images) if has_tower else "it is a text-only model"
    seeing = ", ".join(name for name, row in FAMILIES.items() if getattr(row, media))
    raise DataError(f"prompts with {media} cannot be used with {model_type}: {why}. Use {seeing}.")


@dataclass(frozen=True)
class PromptImages:
    """Images and videos of one prompt, or of the response after it, as model inputs, in the order of the text.

    A video is one image with several steps in time, or one image per step in families with text between the steps.
    """

    pixel_values: np.ndarray
    """[rows, …] (float32): patches (or tiles) of all images, image after image."""
    grids: np.ndarray | None
    """[images, 3] (int64): patches in time, height and width. None for a family of tiles of one size."""
    num_rows: np.ndarray
    """[images]: rows of ``pixel_values``."""
    num_tokens: np.ndarray
    """[images]: number of placeholders in the text."""
    places: np.ndarray
    """[sum of num_tokens]: indices of the placeholders in the text."""
    positions: np.ndarray | None
    """[3, text length] (int64): positions of all its tokens, from 0. None if they are 0, 1, 2, …"""
    seconds: np.ndarray | None = None
    """[images]: seconds per step in time of a video; 0 for an image. None: only images."""

    def __len__(self) -> int:
        return len(self.num_tokens)

    def __repr__(self) -> str:
        return f"<PromptImages: {len(self)} images, {int(self.num_tokens.sum())} tokens, {self.nbytes:,} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels."""
        return self.pixel_values.nbytes

    @property
    def all_seconds(self) -> np.ndarray:
        """``seconds``, as zeros if there are only images."""
        return np.zeros(len(self)) if self.seconds is None else self.seconds


@dataclass(frozen=True)
class EncodedPrompt:
    """Images and tokens [n] (int32) of a prompt or a prefix of it, with a placeholder per image token."""

    tokens: np.ndarray
    images: PromptImages | None = None

    @property
    def position_shift(self) -> int:
        """Difference between the positions of a response and its token indices."""
        return answer_position(self.images, len(self.tokens)) - len(self.tokens)

    @property
    def image_end(self) -> int:
        """Index after the last image token; 0 without images."""
        return int(self.images.places[-1]) + 1 if self.images else 0

    def until(self, stop: int) -> EncodedPrompt:
        """Return the first ``stop`` tokens, which must include all images."""
        images = self.images
        if images is not None and images.positions is not None:
            images = replace(images, positions=images.positions[:, :stop])
        return EncodedPrompt(self.tokens[:stop], images)

    def followed_by(self, other: EncodedPrompt) -> EncodedPrompt:
        """Return this text followed by ``other``, with the images of both."""
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
        seconds = one_array([images.all_seconds for images in having])
        images = PromptImages(
            one_array([images.pixel_values for images in having]),
            one_array(grids) if grids else None,
            one_array([images.num_rows for images in having]),
            one_array([images.num_tokens for images in having]),
            np.concatenate(places),
            positions,
            seconds if seconds.any() else None,
        )
        return EncodedPrompt(tokens, images)

    def _positions(self) -> np.ndarray:
        """Return positions [3, n]."""
        of_images = None if self.images is None else self.images.positions
        count = np.arange(len(self.tokens))
        return np.broadcast_to(count, (3, len(count))) if of_images is None else of_images


def one_array(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the concatenated arrays. A single array, as pixels usually are, is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


# -- conversations -----------------------------------------------------------------------------------------------------


def with_parts(messages: Sequence[Mapping[str, Any]], num_images: int, num_videos: int = 0) -> list[dict[str, Any]]:
    """Split ``<image>`` and ``<video>`` slots in texts into content parts, as chat templates require.

    A message without slots stays unchanged. Raises DataError if slots do not match images and videos.
    """
    converted_messages: list[dict[str, Any]] = []
    slots: list[str] = []
    for message in messages:
        content = message.get("content")
        parts = _parts(content) if isinstance(content, str) else [_part(entry) for entry in content or ()]
        own = [part["type"] for part in parts if part["type"] != "text"]
        slots += own
        converted_messages.append(
            {**message, "content": parts} if own or not isinstance(content, str) else dict(message)
        )
    for slot, number in ((SLOT, num_images), (VIDEO_SLOT, num_videos)):
        if (num_slots := slots.count(kind := _SLOTS[slot])) != number:
            hint = "" if number or slot == VIDEO_SLOT else " Does data.image_key name the column of its images?"
            raise DataError(
                f"the prompt has {num_slots} slots for {kind}s ({slot}) and the row has {number} {kind}s.{hint}"
            )
    return converted_messages


def has_slot(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message has a slot of an image or a video."""
    contents = [message.get("content") or "" for message in messages]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    return any(isinstance(content, str) and slot in content for content in contents for slot in _SLOTS) or any(
        isinstance(part, Mapping) and part.get("type") in _SLOTS.values() for part in parts
    )


def without_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as plain texts for a text-only reader, with ``<image>`` for each image."""
    return [{**message, "content": _flat(message.get("content"))} for message in messages]


def _flat(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", f"<{part['type']}>") for part in map(_part, content or ()))


def _parts(text: str) -> list[dict[str, Any]]:
    pieces = [piece for piece in re.split(f"({'|'.join(_SLOTS)})", text) if piece]
    return [{"type": _SLOTS[piece]} if piece in _SLOTS else {"type": "text", "text": piece} for piece in pieces]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": part.get("text") or ""}
    if kind not in _SLOTS.values():
        raise DataError(f"a message holds a part of type {kind!r}; supported are text, image and video.")
    return {"type": kind}


# -- pixels ------------------------------------------------------------------------------------------------------------


def open_image(image: Any) -> Any:
    """Open an image as upright RGB PIL image, with transparent pixels in white. image: {"bytes", "path"}, bytes, a path
    or a PIL image. Raises DataError if it is unreadable or too large.
    """
    with _reading():
        from PIL import Image, ImageOps

        opened = image if isinstance(image, Image.Image) else _opened(file_bytes(image))
        check_pixels(opened)
        opened = _to_8_bits(ImageOps.exif_transpose(opened), opened.format)
        if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
            opened = opened.convert("RGBA")
            # Figures are often black lines on a transparent background, which would vanish on black.
            white = Image.new("RGBA", opened.size, (255, 255, 255, 255))
            opened = Image.alpha_composite(white, opened)
        return opened.convert("RGB")


def _to_8_bits(image: Any, kind: str | None) -> Any:
    """Convert 16-bit greys to 8 bits, because Pillow would make them white. kind: format of the file."""
    # Older Pillow versions open 16-bit PNGs in mode "I".
    if image.mode == "F" or (image.mode == "I" and kind != "PNG"):
        raise DataError(
            f"its grey values have 32 bits (Pillow's mode {image.mode!r}), so it is unknown which value is white: "
            "save it as a PNG of 8 or 16 bits."
        )
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    greys = np.round(values / 257)
    greys[values == image.info.get("transparency")] = 255  # transparent pixels become white
    return _pillow().fromarray(greys.astype(np.uint8))


def image_size(image: Any) -> tuple[int, int]:
    """Return width and height of `open_image`'s result for a file, (0, 0) without Pillow. Raises DataError as it does.

    They are read from the header, and the rest of the file is checked for damage. Pixels are decoded only if neither
    checksums nor the end of the file show that it is complete, or if the image may be rotated.
    """
    with _reading():
        data = file_bytes(image)
        pillow = _pillow()
        if pillow is None:
            if not begins_as_image(data):
                raise DataError("it does not begin like an image file.")
            return (0, 0)
        with _opened(data) as opened:
            check_pixels(opened)
            width, height = opened.size
            if not _is_complete(opened, data):
                return open_image(data).size
            # A PNG with an orientation was decoded above.
            turned = opened.format != "PNG" and opened.getexif().get(_ORIENTATION, 1) >= _FIRST_TURNED
        return (height, width) if turned else (width, height)


def _is_complete(opened: Any, data: bytes) -> bool:
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
    """Return PIL.Image, or None."""
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


def check_pixels(opened: Any) -> None:
    """Raise DataError for an image or a frame of too many pixels."""
    if opened.width * opened.height > _MOST_PIXELS:
        raise DataError(
            f"it is {opened.width} x {opened.height}, more than {_MOST_PIXELS:,} pixels: a decompression bomb, or "
            "an image that must be scaled down before training."
        )


def blank_image() -> Any:
    """Return a small empty image."""
    from PIL import Image

    return Image.new("RGB", (64, 64))


def bounded_size(size: tuple[int, int], min_pixels: int | None, max_pixels: int | None, unit: int) -> tuple[int, int]:
    """Scale width and height to at least ``min_pixels`` and at most ``max_pixels`` (None: no bound).

    Proportions are kept. unit: side length of an image token in pixels; scaled sides are multiples of it. Sizes that
    exceed the bounds after this rounding are scaled too. The formula is the same as in Qwen2-VL's processor, which then
    changes nothing.
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
    """Scale a PIL image to its `bounded_size`."""
    size = bounded_size(image.size, min_pixels, max_pixels, unit)
    return image if size == image.size else image.resize(size, resample=3)  # bicubic, like the processors


# -- places and positions ----------------------------------------------------------------------------------------------


def runs(tokens: np.ndarray, placeholders: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return start and length of every run of ``placeholders`` in ``tokens`` [n]."""
    is_one = np.concatenate([[False], np.isin(tokens, placeholders), [False]])
    edges = np.flatnonzero(is_one[1:] != is_one[:-1])
    return edges[::2], edges[1::2] - edges[::2]


def collapse_placeholders(tokens: np.ndarray, placeholders: Sequence[int]) -> np.ndarray:
    """Return ``tokens`` with every run of a placeholder shortened to one."""
    again = np.concatenate([[False], np.isin(tokens[1:], placeholders) & (tokens[1:] == tokens[:-1])])
    return tokens[~again]


def mrope_positions(
    tokens: np.ndarray, placeholders: Sequence[int], grids: np.ndarray, merge: int, steps: np.ndarray | None = None
) -> np.ndarray:
    """Compute positions [3, n] of a prompt in time, height and width, like `get_rope_index` of Qwen2-VL and later.

    Text tokens increase all rows by one. An image's tokens have grid positions that start after the preceding text, and
    the following text continues after the largest. grids [images, 3], in patches; merge: side length of a token in
    patches; steps [images]: increment per step in time (None: 1), whose multiples are rounded down. A response
    continues at the largest position plus one (`answer_position`).
    (As in vLLM and transformers 4. In transformers 5, text after a long video starts before its last position in time.)
    """
    starts, lengths = runs(tokens, placeholders)
    steps = np.ones(len(grids)) if steps is None else steps
    positions = np.zeros((3, len(tokens)), dtype=np.int64)
    end = position = 0
    for start, length, grid, step in zip(starts.tolist(), lengths.tolist(), grids.tolist(), steps, strict=True):
        positions[:, end:start] = position + np.arange(start - end)
        position += start - end
        places = np.indices((grid[0], grid[1] // merge, grid[2] // merge)).reshape(3, -1)
        places[0] = (places[0] * step).astype(np.int64)
        positions[:, start : start + length] = position + places
        position += int(places.max()) + 1
        end = start + length
    positions[:, end:] = position + np.arange(len(tokens) - end)
    return positions


def answer_position(images: PromptImages | None, prompt_length: int) -> int:
    """Return the position of a response's first token."""
    if images is None or images.positions is None:
        return prompt_length
    return int(images.positions.max()) + 1
