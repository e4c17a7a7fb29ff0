"""The uses, in our own sources, of packages that cannot run here: imports, attributes, calls and texts. Attributes and
calls are matched by name, so our own attributes with a name in `uses` must be used in the same way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """A call of ``name`` (an attribute, or ``module:Name`` of an import)."""

    name: str
    num_positional: int
    keywords: tuple[str, ...]


class Scan:
    """The uses of the packages or modules ``foreign`` in a file."""

    def __init__(self, file: Path, foreign: Sequence[str]) -> None:
        self._nodes = list(ast.walk(ast.parse(file.read_text())))
        self.imported: dict[str, str] = {}
        for node in self._nodes:
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if any(f"{module}.".startswith(f"{name}.") for name in foreign):
                self.imported |= {alias.asname or alias.name: f"{module}:{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names = [alias for alias in node.names if alias.name.split(".")[0] in foreign or alias.name in foreign]
                self.imported |= {alias.asname or alias.name: f"{alias.name}:" for alias in names}

    def attributes(self) -> set[str]:
        """Return the attributes of any object, and those named by `getattr` and `hasattr`."""
        asked = {
            node.args[1].value for node in self._nodes
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr")
            and isinstance(node.args[1], ast.Constant)
        }  # fmt: skip
        return asked | {node.attr for node in self._nodes if isinstance(node, ast.Attribute)}

    def texts(self) -> set[str]:
        """Return the texts that could be names: of keys, tags, modules, options. Documentation and messages are
        excluded."""
        no_names = {id(node.value) for node in self._nodes if isinstance(node, ast.Expr)} | {
            id(inner) for node in self._nodes if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)
        }
        texts = [node.value for node in self._nodes if isinstance(node, ast.Constant) and id(node) not in no_names]
        return {text for text in texts if isinstance(text, str) and re.fullmatch(r"[A-Za-z][\w.]+", text)}

    def calls(self) -> Iterator[Use]:
        """Return the calls of imported names, and of attributes of anything but self."""
        for node in self._nodes:
            if not isinstance(node, ast.Call):
                continue
            given = len([each for each in node.args if not isinstance(each, ast.Starred)])
            keywords = tuple(each.arg for each in node.keywords if each.arg)
            if isinstance(node.func, ast.Name) and node.func.id in self.imported:
                yield Use(self.imported[node.func.id], given, keywords)
            elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "self":
                yield Use(node.func.attr, given, keywords)
