"""Where files of the user's own are modules: rltrain.base.plugins.NAME, and NAME is the path of the file.

A process that `multiprocessing` or Ray starts afresh knows a function by its module's name alone. It finds the file by
that name, since to import it imports this package first.
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

__path__ = []  # a neighbour of this file is no plug-in
# Loggers of the user's own are not rltrain's, which tell of more than warnings. Named in this order, since a logger
# that is made later takes those below it to itself.
logging.getLogger("rltrain")
logging.getLogger(__name__).parent = logging.getLogger()


def module_name(file: Path) -> str:
    """The name of ``file`` as a module. It depends on the path alone, so all processes know it by one."""
    # Letters and digits stand for themselves, so that whoever meets the name can read it.
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
            # Last: a neighbour that has the name of an installed package must not take its place for everybody.
            sys.path.append(folder)
        spec = importlib.util.spec_from_file_location(fullname, file) if os.path.isfile(file) else None
        if spec:
            spec.loader_state = os.stat(file).st_mtime_ns
        return spec


sys.meta_path.append(_Finder())
