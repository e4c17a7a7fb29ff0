"""Image paths that do not refer to an image file."""

import os
from pathlib import Path

import pytest

from rltrain.common.errors import DataError
from rltrain.common.images import file_bytes


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large", "no image", "/proc/self/mem"])
def test_paths_that_are_not_image_files_are_rejected(tmp_path, kind):
    file = tmp_path / "x.png"
    if kind.startswith("/"):
        file = Path(kind)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        with open(file, "wb") as stream:
            stream.write(b"GIF89a" if kind == "large" else b"")
            stream.truncate((3 << 30) if kind == "large" else (2 << 20))
    with pytest.raises(
        DataError,
        match=r"regular file|is empty|has 3,221,225,472 bytes|does not start with|directory",
    ):
        file_bytes({"path": "/dev/zero" if kind == "device" else file})
