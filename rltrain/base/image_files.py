"""The file of an image, in whichever of its forms it was given: bytes, a path, base64, or a dictionary of one of them.

Rows of data, tools and environments give images alike, so what an image may be is known here alone. Nothing is opened
as an image: that takes Pillow, and processes that call tools need not import it.
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

from rltrain.base.errors import DataError, host_error, short

_MAGIC = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|BM|II\*\0|MM\0\*", re.DOTALL)
# An image as base64: its letters, those in addresses, and fewer than the smallest file has.
_CODE, _URL_SAFE, _LEAST_CODE = re.compile(r"[A-Za-z0-9+/]+"), str.maketrans("-_", "+/"), 40

# Of a file: what 67 million pixels take without compression.
_MAX_BYTES, _SMALL_BYTES = 256 << 20, 1 << 20


def begins_as_image(data: bytes) -> bool:
    """Whether the first bytes are those of an image that is read."""
    return _MAGIC.match(data) is not None


def image_entry(image: Any, folder: Path) -> Mapping[str, Any]:
    """An image as a dictionary of ``bytes`` or ``path``; what names neither is returned for `file_bytes` to refuse.

    A path without bytes is taken from ``folder``.
    """
    entry = image if isinstance(image, Mapping) else {"path": image} if isinstance(image, str) else {"bytes": image}
    data = entry.get("bytes")
    if isinstance(data, bytes) and data:
        return {**entry, "bytes": _decoded(data)}
    if data and not isinstance(data, str):
        return entry
    # verl's own files name an image by "image", and those of conversations by the address of a part.
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
    """The file that stands in bytes, be it as base64; what it is where it is none."""
    text = "" if begins_as_image(data) or not data.isascii() else data.decode()
    return _encoded(text, is_data=False) or data


def _encoded(text: str, *, is_data: bool) -> bytes | None:
    """The file that stands in a text as base64, bare or as a ``data:`` address; None where the text is a name.

    A bare one must begin as an image does, unless it can be no name (``is_data``). What cannot be decoded is what it
    is, and no image.
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
    """An image as a ``data:`` address, as it travels between processes. image: as rows have it, or one of Pillow.

    A path is taken from the current folder. Raises DataError for what is no image.
    """
    if callable(getattr(image, "getbands", None)):
        file = BytesIO()
        image.save(file, "PNG", compress_level=1)
        content = file.getvalue()
    else:
        content = file_bytes(image_entry(str(image) if isinstance(image, Path) else image, Path()))
    if not begins_as_image(content):
        raise DataError("it does not begin as a file of an image does.")
    return f"data:image;base64,{base64.b64encode(content).decode()}"


def file_of(address: str) -> bytes:
    """What `data_address` was made of."""
    return base64.b64decode(address.partition(",")[2])


def file_bytes(image: Any) -> bytes:
    """The file of an image, whatever it holds: of {"bytes", "path"}, bytes or a path. Raises DataError where there is
    none.
    """
    with reading():
        entry: Mapping[str, Any] = (
            image if isinstance(image, Mapping) else {"bytes": image} if isinstance(image, bytes) else {"path": image}
        )
        if isinstance(entry.get("bytes"), bytes) and entry["bytes"]:
            return entry["bytes"]
        if not isinstance(entry.get("path"), (str, Path)) or not str(entry["path"]):
            raise DataError(f"it is a {type(image).__name__} with neither bytes nor a path.")
        if "://" in str(entry["path"]):
            address = short(entry["path"])
            raise DataError(f"{address!r} is a web address; copy the image to a local disk and give its path.")
        return _read(Path(entry["path"]).expanduser())


def _read(path: Path) -> bytes:
    try:
        # Without O_NONBLOCK a pipe is waited for when it is opened.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DataError(f"{short(path, 60)!r} is not a regular file.")
            if not found.st_size:  # files of /proc too, which may have no end
                raise DataError(f"{short(path, 60)!r} is empty.")
            if found.st_size > _MAX_BYTES:
                raise DataError(
                    f"{short(path, 60)!r} has {found.st_size:,} bytes; an image has at most {_MAX_BYTES:,}."
                )
            head = file.read(16)
            # The rest of a small file is read for the message of who opens it.
            if found.st_size > _SMALL_BYTES and not begins_as_image(head):
                raise DataError(f"{short(path, 60)!r} does not begin as a file of an image does.")
            return head + file.read(_MAX_BYTES)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise DataError(f"{short(path, 60)!r} is not a regular file.") from error
        if error.errno == errno.ENAMETOOLONG or (error.errno == errno.ENOENT and "." not in path.name):
            raise DataError(f"{short(path, 60)!r} is neither a file nor an image as base64.") from error
        error.filename = short(path)  # which is told where a file is opened, and not where it is read
        raise


@contextmanager
def reading(*errors: type[Exception]) -> Iterator[None]:
    """Inside, what reading a file raises, or one of ``errors``, becomes a DataError or what the host's trouble is."""
    unreadable: tuple[type[Exception], ...] = (OSError, ValueError, *errors)
    try:
        yield
    except unreadable as error:
        raise host_error(error) or DataError(f"it cannot be read: {re.sub(r' <_io.*?>', '', str(error))}") from error
