"""Package of user files: the file at path NAME is the module rltrain.common.plugins.NAME.

A fresh process of `multiprocessing` or Ray finds a function only by its module's name. In such a process the name can
be imported, because Python imports this package first.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import os
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

__path__ = []  # no file in this folder is a plug-in
# Loggers of user files must not have rltrain's logger as parent, because it logs more than warnings. The package's
# logger is created first, because a new logger becomes the parent of existing ones below it.
logging.getLogger("rltrain")
logging.getLogger(__name__).parent = logging.getLogger()


def module_name(file: Path) -> str:
    """Return the module name of ``file``. It depends only on the path, so it is equal in all processes."""
    # Letters and digits stay unchanged for readability.
    path = re.sub(rb"[^A-Za-z0-9]", lambda sign: b"_%02x" % sign[0][0], bytes(file.absolute()))
    return f"{__name__}.{path.decode()}"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__:
            return None
        file = os.fsdecode(re.sub(rb"_([0-9a-f]{2})", lambda sign: bytes.fromhex(sign[1].decode()), name.encode()))
        if not os.path.isabs(file):
            raise ImportError(f"attempted relative import with no known parent package: write import {name}", name=name)
        folder = os.path.dirname(file)
        if folder not in sys.path:
            # The folder is last, so that a neighbouring file does not replace an installed package of the same name.
            sys.path.append(folder)
        spec = importlib.util.spec_from_file_location(fullname, file) if os.path.isfile(file) else None
        if spec:
            spec.loader_state = os.stat(file).st_mtime_ns
        return spec


sys.meta_path.append(_Finder())
