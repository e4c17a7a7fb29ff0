"""The API of a package, read from its sources: parameters of functions, members of classes, constants."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from tests.conformance.wheels import Wheel

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
# The file in which torch_npu lists its C++ operators: torch_npu.NAME has this schema.
_OPERATORS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


class Found(NamedTuple):
    """A definition, with its wheel and module."""

    node: ast.AST
    module: str


class Api:
    """Several wheels that are installed together. The first one with a module counts."""

    def __init__(self, wheels: Sequence[Wheel]) -> None:
        self.wheels = list(wheels)
        self.packages = {wheel.name.replace("-", "_") for wheel in wheels}
        self.find, self.members = cache(self._find), cache(self._members)

    def takes(self, path: str) -> list[str] | None:
        """Return the parameters of ``module:Name`` or ``module:Name.member`` (`parameters`; of a class, those of its
        constructor), ["attribute"] if it cannot be called, or None if it does not exist.
        """
        module, _, names = path.partition(":")
        name, _, member = names.partition(".")
        if not name:
            return ["module"] if self._tree(module) else None
        if module == "torch_npu" and (schema := self._operator(name)):
            return schema
        found = self.find(module, name)
        if found is None:
            return ["module"] if not member and self._tree(f"{module}.{name}") else None
        if not member:
            return self._constructor(found) if isinstance(found.node, ast.ClassDef) else parameters(found.node)
        node = self.members(found).get(member)
        if node is None:
            return None
        decorators = [ast.unparse(each) for each in node.decorator_list] if isinstance(node, Function) else []
        if any("property" in decorator for decorator in decorators):
            return ["attribute"]
        own = [] if "staticmethod" in decorators or not isinstance(node, Function) else ["self"]
        return parameters(node)[len(own) :]

    def names(self, place: str) -> set[str]:
        """Return the members of a class ``module:Class``."""
        module, _, name = place.partition(":")
        found = [self.find(module, name)]
        if name == "*" and (tree := self._tree(module)):
            imports = [
                node for node in tree.body if isinstance(node, ast.ImportFrom) and ".fields." in str(node.module)
            ]
            found = [self._imported(module, node, alias.name) for node in imports for alias in node.names]
        return {member for each in found if each for member in self.members(each)}

    def holds(self, module: str, text: str) -> bool:
        """Return whether a module has this string among its constants."""
        tree = self._tree(module)
        return any(isinstance(node, ast.Constant) and node.value == text for node in ast.walk(tree)) if tree else False

    def _tree(self, module: str) -> ast.Module | None:
        return next((tree for wheel in self.wheels if (tree := wheel.module(module))), None)

    def _find(self, module: str, name: str) -> Found | None:
        tree = self._tree(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, (*Function, ast.ClassDef)) and node.name == name:
                return Found(node, module)
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return Found(node, module)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    # A star import may also provide it.
                    if (alias.asname or alias.name) not in (name, "*"):
                        continue
                    if found := self._imported(module, node, name if alias.name == "*" else alias.name):
                        return found
        # Packages that import on demand list their sources: "LLM": ".entrypoints.llm:LLM".
        lazy = {k.value: v.value for node in ast.walk(tree) if isinstance(node, ast.Dict)
                for k, v in zip(node.keys, node.values, strict=True)
                if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)}  # fmt: skip
        where = re.fullmatch(r"\.([\w.]+):(\w+)", str(lazy.get(name)))
        return self.find(f"{module}.{where[1]}", where[2]) if where else None

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> Found | None:
        base = module.split(".")
        if node.level:
            package = any(wheel.is_package(module) for wheel in self.wheels)
            base = base[: len(base) - node.level + package]
        source = ".".join([*(base if node.level else []), *([node.module] if node.module else [])])
        if source.split(".")[0] not in self.packages:
            return None
        if found := self.find(source, name):
            return found
        tree = self._tree(f"{source}.{name}")
        return Found(tree, f"{source}.{name}") if tree else None

    def _members(self, found: Found) -> dict[str, ast.AST]:
        """Return the members of a class and its bases: methods, declared and assigned attributes, and those that
        methods set on self."""
        members: dict[str, ast.AST] = {}
        if not isinstance(found.node, ast.ClassDef):
            # A module: what it defines.
            return {each.name: each for each in getattr(found.node, "body", ()) if isinstance(each, Function)}
        for base in found.node.bases:
            name = ast.unparse(base).split("[")[0]
            if found_base := self.find(found.module, name.split(".")[-1]):
                members |= self.members(found_base)
        for node in ast.walk(found.node):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
                    members.setdefault(each.attr, node)
        for node in _statements(found.node.body):
            if isinstance(node, Function):
                members[node.name] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                members[node.target.id] = node
            elif isinstance(node, ast.Assign):
                members |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        return members

    def _constructor(self, found: Found) -> list[str]:
        members = self.members(found)
        if isinstance(made := members.get("__init__"), Function):
            return parameters(made)[1:]
        declared = {name: node for name, node in members.items() if isinstance(node, ast.AnnAssign)}
        return [f"{name}=" if node.value else name for name, node in declared.items()
                if isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation)]  # fmt: skip

    def _operator(self, name: str) -> list[str] | None:
        text = next((text for wheel in self.wheels if (text := wheel.text(_OPERATORS))), "")
        schema = re.search(rf"func: {name}\((.*)\) ->", text)
        if not schema:
            return None
        # "Tensor query, int head_num, *, Tensor? pse=None": a type, a name and perhaps a default.
        # Python calls the tensor that C++ calls self: input.
        names = [word if word == "*" else re.sub(r"^\S+ (\w+=?).*", r"\1", word) for word in schema[1].split(", ")]
        return ["input" if each == "self" else each for each in names]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, including those within ``if`` and ``try``."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                for inner in getattr(node, part, ()):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def parameters(node: ast.AST) -> list[str]:
    """Return the parameters in order: ``name``, ``name=`` with a default, ``*`` or ``*rest`` before keywords,
    ``**rest``."""
    if not isinstance(node, Function):
        return ["attribute"]
    takes = node.args
    named = [*takes.posonlyargs, *takes.args]
    first = len(named) - len(takes.defaults)
    found = [f"{each.arg}=" if place >= first else each.arg for place, each in enumerate(named)]
    if takes.vararg or takes.kwonlyargs:
        found.append(f"*{takes.vararg.arg if takes.vararg else ''}")
    found += [
        f"{each.arg}=" if value else each.arg for each, value in zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
    ]
    return [*found, *([f"**{takes.kwarg.arg}"] if takes.kwarg else [])]


def refusal(takes: Sequence[str], num_positional: int, keywords: Sequence[str]) -> str | None:
    """Return the reason why a function with these parameters would reject such a call, or None. A call with ``**`` may
    lack arguments."""
    if list(takes) == ["attribute"]:
        return None
    star = next((place for place, name in enumerate(takes) if name.startswith("*")), len(takes))
    by_place, any_number = takes[:star], star < len(takes) and takes[star] not in ("*",) and takes[star][1:2] != "*"
    if num_positional > len(by_place) and not any_number:
        return f"takes {len(by_place)} positional arguments, not {num_positional}"
    names = {name.rstrip("=") for name in takes if not name.startswith("*")}
    unknown = set(keywords) - names if not any(name.startswith("**") for name in takes) else set()
    if unknown:
        return f"knows no {', '.join(sorted(unknown))}"
    return None
