"""Image files in all supported forms: bytes, a path, base64, or a dictionary of one of them.

Data rows, tools and environments accept the forms that this module defines. Images are not decoded here, because that
requires Pillow, which tool processes need not import.
"""

from __future__ import annotations

import base64
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from rltrain.common.errors import DataError, host_error, short

_MAGIC = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|BM|II\*\0|MM\0\*", re.DOTALL)
# Base64 of an image: its characters, their URL-safe variants, and a length shorter than any image file.
_CODE, _URL_SAFE, _LEAST_CODE = re.compile(r"[A-Za-z0-9+/]+"), str.maketrans("-_", "+/"), 40

# Maximum file size: 67 million pixels without compression.
_MAX_BYTES, _SMALL_BYTES = 256 << 20, 1 << 20
_MAX_VIDEO_BYTES = 1 << 30


def begins_as_image(data: bytes) -> bool:
    """Return whether the first bytes match a supported image format."""
    return _MAGIC.match(data) is not None


def image_entry(image: Any, folder: Path) -> Mapping[str, Any]:
    """Return an image as a dictionary with ``bytes`` or ``path``. Other values are returned unchanged; `file_bytes`
    rejects them.

    A path without bytes is relative to ``folder``.
    """
    entry = image if isinstance(image, Mapping) else {"path": image} if isinstance(image, str) else {"bytes": image}
    data = entry.get("bytes")
    if isinstance(data, bytes) and data:
        return {**entry, "bytes": _decoded(data)}
    if data and not isinstance(data, str):
        return entry
    # verl's files use the key "image", and conversations use the URL of a part.
    url = entry.get("image_url")
    name = data or entry.get("path") or entry.get("image") or entry.get("url")
    name = name or (url.get("url") if isinstance(url, Mapping) else url)
    if isinstance(name, bytes):
        return {"bytes": _decoded(name)}
    if not isinstance(name, str):
        return entry
    if (encoded := _encoded(name, is_data=bool(data))) is not None:
        return {"bytes": encoded}
    name = name.removeprefix("file://")
    return {"path": name if "://" in name else folder / Path(name).expanduser()}


def _decoded(data: bytes) -> bytes:
    """Decode bytes that contain base64. Others are returned unchanged."""
    text = "" if begins_as_image(data) or not data.isascii() else data.decode()
    return _encoded(text, is_data=False) or data


def _encoded(text: str, *, is_data: bool) -> bytes | None:
    """Decode a text that is base64, bare or as a ``data:`` URL. Returns None if the text is a name.

    A bare text must start like an image, unless it cannot be a name (``is_data``). Text that cannot be decoded is
    returned as bytes, which are not an image.
    """
    head, comma, code = text.partition(",")
    is_address = text[:5].lower() == "data:"
    if is_address and not (comma and head.lower().endswith(";base64")):
        return text.encode()
    code = "".join((code if is_address else text).split()).translate(_URL_SAFE).rstrip("=")
    if not (is_address or is_data or (len(code) >= _LEAST_CODE and _CODE.fullmatch(code))):
        return None
    try:
        content = base64.b64decode(code + "=" * (-len(code) % 4), validate=True)
    except ValueError:
        return text.encode() if is_address or is_data else None
    return content if is_address or is_data or begins_as_image(content) else None


def data_address(image: Any) -> str:
    """Return an image as a ``data:`` URL, for other processes. image: in any form that rows accept, or a Pillow image.

    A path is relative to the working directory. Raises DataError if it is not an image.
    """
    if callable(getattr(image, "getbands", None)):
        file = BytesIO()
        image.save(file, "PNG", compress_level=1)
        content = file.getvalue()
    else:
        content = file_bytes(image_entry(str(image) if isinstance(image, Path) else image, Path()))
    if not begins_as_image(content):
        raise DataError("its first bytes are not those of an image file.")
    return f"data:image;base64,{base64.b64encode(content).decode()}"


def file_of(address: str) -> bytes:
    """Return the image file of a `data_address`."""
    return base64.b64decode(address.partition(",")[2])


def file_bytes(image: Any, *, video: bool = False) -> bytes:
    """Return the file of an image ({"bytes", "path"}, bytes or a path), unchecked. Raises DataError without one.

    video: it is the file of a video.
    """
    with reading():
        entry: Mapping[str, Any] = (
            image if isinstance(image, Mapping) else {"bytes": image} if isinstance(image, bytes) else {"path": image}
        )
        if isinstance(entry.get("bytes"), bytes) and entry["bytes"]:
            return entry["bytes"]
        if not isinstance(entry.get("path"), (str, Path)) or not str(entry["path"]):
            raise DataError(f"it is a {type(image).__name__} without bytes and path.")
        if "://" in str(entry["path"]):
            address = short(entry["path"])
            raise DataError(f"{address!r} is a web address; copy the file to a local disk and give its path.")
        return _read(Path(entry["path"]).expanduser(), video)


def _read(path: Path, video: bool) -> bytes:
    most = _MAX_VIDEO_BYTES if video else _MAX_BYTES
    try:
        # Open with O_NONBLOCK, because opening a pipe would otherwise block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{short(path, 60)!r} is not a regular file.")
            if not status.st_size:  # files in /proc may be endless
                raise DataError(f"{short(path, 60)!r} is empty.")
            if status.st_size > most:
                raise DataError(f"{short(path, 60)!r} has {status.st_size:,} bytes; it may have at most {most:,}.")
            head = file.read(16)
            # A small file is read completely, because its decoder can report the error better.
            if not video and status.st_size > _SMALL_BYTES and not begins_as_image(head):
                raise DataError(f"{short(path, 60)!r} does not start with the bytes of an image file.")
            return head + file.read(most)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise DataError(f"{short(path, 60)!r} is not a regular file.") from error
        if error.errno == errno.ENAMETOOLONG or (error.errno == errno.ENOENT and "." not in path.name):
            raise DataError(f"{short(path, 60)!r} is neither a file nor a base64 image.") from error
        error.filename = short(path)  # open errors have a file name, but read errors do not
        raise


@contextmanager
def reading(*errors: type[Exception]) -> Iterator[None]:
    """Convert OSError, ValueError and ``errors`` raised inside the context to `host_error` or DataError."""
    unreadable: tuple[type[Exception], ...] = (OSError, ValueError, *errors)
    try:
        yield
    except unreadable as error:
        raise host_error(error) or DataError(f"it cannot be read: {re.sub(r' <_io.*?>', '', str(error))}") from error
