"""Message content between turns: a text, or parts of text and images, in the format of chat templates.

Tools and environments return an image in any form that a row accepts, or as a Pillow image. It is sent as an image file
in base64, so that the run's processor always gets the same bytes, in every process and after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rltrain.common.errors import DataError
from rltrain.common.images import begins_as_image, data_address

Part = dict[str, str]
Content = str | list[Part]
_HOLDERS = ("image", "image_url", "bytes", "path")
# Maximum base64 bytes of all images between two turns.
MOST_IMAGE_BYTES = 16 << 20
NO_IMAGES = (
    "an image, but this run accepts none between turns. If the model reads images, set "
    "actor_rollout_ref.rollout.multi_turn.images=True."
)


def is_image(value: Any) -> bool:
    """Return True if a value can only be an image: a Pillow image, the bytes of a file, or a part of type image."""
    if isinstance(value, Mapping):
        # A dictionary that has the type but no image is an ordinary dictionary.
        return value.get("type") in ("image", "image_url") and any(value.get(name) is not None for name in _HOLDERS)
    return begins_as_image(value) if isinstance(value, bytes) else callable(getattr(value, "getbands", None))


def content_of(value: Any) -> Content | None:
    """Return parts for an image or a list with one; a text for a text or a list of text parts; None for anything else.

    Raises ValueError for an unreadable image, and for an entry that is neither text nor image.
    """
    if isinstance(value, str):
        return value
    parts = list(value) if isinstance(value, list | tuple) else [value]
    if any(map(is_image, parts)):
        return _parts(parts)
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return "".join(map(str, texts)) if texts and len(texts) == len(parts) else None


def with_images(images: Any, text: str) -> Content:
    """Return image parts followed by a text. images: one image or a list, in any form that a row accepts."""
    listed = list(images) if isinstance(images, list | tuple) else [images]
    parts = [image if is_image(image) else {"type": "image", "image": image} for image in listed]
    return _parts([*parts, *([text] if text else [])])


def _parts(entries: Sequence[Any]) -> list[Part]:
    parts: list[Part] = []
    num_images = sum(map(is_image, entries))
    for entry in entries:
        if is_image(entry):
            number = 1 + sum(part["type"] == "image" for part in parts)
            try:
                parts.append({"type": "image", "image": data_address(_image_of(entry))})
            except DataError as error:
                raise ValueError(f"image {number} of {num_images}: {error}") from error
        elif isinstance(entry, str):
            parts.append({"type": "text", "text": entry})
        elif isinstance(entry, Mapping) and entry.get("type") == "text":
            parts.append({"type": "text", "text": str(entry.get("text") or "")})
        else:
            raise ValueError(f"{entry!r:.80} is next to an image and is neither a text nor an image.")
    return parts


def _image_of(image: Any) -> Any:
    """Return the image of a part."""
    if not isinstance(image, Mapping):
        return image
    inner = image.get("image")
    return (
        inner
        if isinstance(inner, Mapping) or is_image(inner)
        else {name: value for name, value in image.items() if name != "type"}
    )


def images_in(content: Content) -> list[str]:
    """Return the images as ``data:`` URLs."""
    return [] if isinstance(content, str) else [part["image"] for part in content if part["type"] == "image"]


def texts_in(content: Content) -> list[str]:
    """Return the texts."""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def image_bytes(contents: Iterable[Content]) -> int:
    """Return the bytes of all images in several contents, in base64."""
    return sum(len(image) for content in contents for image in images_in(content))


def with_texts(content: Content, change: Callable[[str], str]) -> Content:
    """Return the content with ``change`` applied to each text."""
    if isinstance(content, str):
        return change(content)
    return [part | {"text": change(part["text"])} if part["type"] == "text" else part for part in content]


def as_text(content: Content) -> str:
    """Return one text for logs, with ``<image>`` for each image."""
    return content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)


def without_files(content: Content) -> Content:
    """Return the content with image placeholders, for chat templates and logs."""
    if isinstance(content, str):
        return content
    return [{"type": "image"} if part["type"] == "image" else part for part in content]
