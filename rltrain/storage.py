"""Reading from storage that may be gone for a moment, as network storage is while a server starts anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rltrain.errors import StorageError

T = TypeVar("T")
_TRIED_S, _PAUSE_S = 5.0, 0.5


def patiently(path: Path, read: Callable[[], T]) -> T:
    """What ``read`` returns, which looks at ``path``; tried again for seconds where storage fails.

    Raises StorageError where it does not come back. That something is not there, or is a folder, is an answer and no
    failure: these OSErrors are raised as they are.
    """
    deadline = 0.0
    while True:
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise
        except OSError as error:
            # Counted from the first failure, as reading itself may take long.
            deadline = deadline or time.monotonic() + _TRIED_S
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{path} cannot be read: {error.strerror or error}. That is no damage to pass over: see to the "
                    "storage (or its permissions) and run the same command again. If the file itself is lost, move "
                    "its checkpoint folder away."
                ) from error
        time.sleep(_PAUSE_S)
