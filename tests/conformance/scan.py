"""What our code uses of packages that it cannot be run with here, read from our own sources.

An expression is *foreign* where it comes from such a package: an imported name, a parameter or result that is annotated
``Any`` (which in adapters is what we call foreign objects), and whatever is reached, called or taken out of those. The
attributes of foreign expressions, the arguments of foreign calls and the texts in an adapter are what it uses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
# Attributes that every one of these has are not looked up: a foreign dict is a dict.
_EVERYDAY = {name for kind in (str, dict, list, set, int, Exception, torch.Tensor, nn.Module) for name in dir(kind)}


class Use(NamedTuple):
    """name: an attribute, or ``module:Name`` of an import. num_positional, keywords: of a call, else None."""

    name: str
    line: int
    num_positional: int | None = None
    keywords: tuple[str, ...] = ()


class Scan:
    """A file's uses of the packages or modules ``foreign``.

    makers: functions of other files -> what they return. objects: what is annotated ``Any`` is foreign, too.
    """

    def __init__(self, file: Path, foreign: Sequence[str], makers: Mapping[str, str], objects: bool) -> None:
        self._foreign, self._returned, self._objects = foreign, makers, objects
        self._tree = ast.parse(file.read_text())
        self._makers = {
            node.name for node in ast.walk(self._tree)
            if objects and isinstance(node, Function) and _any(node.returns)
        }  # fmt: skip
        self._own: set[str] = set()  # attributes of self that hold foreign objects
        self._hands_on: dict[str, tuple[str, set[str]]] = {}  # ours -> the foreign function that gets its **keywords
        self._imported: dict[str, str] = {}
        self.uses: list[Use] = []
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and self._counts(node.module or ""):
                self._imported |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                self._imported |= {
                    alias.asname or alias.name: f"{alias.name}:" for alias in node.names
                    if self._counts(alias.name)
                }  # fmt: skip
        self.uses += [Use(name, 0) for name in self._imported.values()]
        # Twice: what one method puts on self, another one uses.
        for _ in range(2):
            found = [use for scope in _scopes(self._tree) for use in self._in(scope)]
        self.uses += found

    def _counts(self, module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in self._foreign)

    def texts(self) -> set[str]:
        """Texts that could be names: of keys, tags, modules, options. Documentation and messages are none."""
        documented = {id(node.value) for node in ast.walk(self._tree) if isinstance(node, ast.Expr)}
        annotations = {id(inner) for node in ast.walk(self._tree) if isinstance(node, ast.JoinedStr)
                       for inner in ast.walk(node)}  # fmt: skip
        return {
            node.value for node in ast.walk(self._tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            and id(node) not in documented | annotations and re.fullmatch(r"[A-Za-z][\w.]+", node.value)
        }  # fmt: skip

    def _keys(self, name: str) -> Iterator[str]:
        """Of a dict that the function around puts together and hands on as keywords."""
        for node in ast.walk(self._scope):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id == name:
                for each in ast.walk(node):
                    yield from (str(key.value) for key in getattr(each, "keys", ()) if isinstance(key, ast.Constant))
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
                yield from (str(key.value) for key in [target.slice] if isinstance(key, ast.Constant))

    def _in(self, scope: ast.AST) -> list[Use]:
        self._scope = scope
        names = set(self._imported)
        if isinstance(scope, Function):
            self._around = scope.name, scope.args
            names |= {
                each.arg
                for each in [*scope.args.args, *scope.args.kwonlyargs]
                if self._objects and _any(each.annotation) and each.arg != "ctx"
            }  # autograd's, which runs anywhere
        for _ in range(3):  # until nothing new is found
            for node in ast.walk(scope):
                self._assign(node, names)
        return [use for node in ast.walk(scope) for use in self._uses(node, names)]

    def _assign(self, node: ast.AST, names: set[str]) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            foreign = (node.value is not None and self._is(node.value, names)) or (
                self._objects and isinstance(node, ast.AnnAssign) and _any(node.annotation)
            )
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            foreign, targets = self._is(node.iter, names), [node.target]
        else:
            return
        for target in targets if foreign else ():
            for each in ast.walk(target):
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                    names.add(each.id)
                elif isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
                    self._own.add(each.attr)

    def _is(self, node: ast.AST, names: set[str]) -> bool:
        if isinstance(node, ast.Name):
            return node.id in names
        if isinstance(node, ast.Attribute):
            mine = isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self._own
            return mine or self._is(node.value, names)
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            reached = name in ("getattr", "next", "iter", "ref") and self._is(node.args[0], names)
            return reached or name in {*self._makers, *self._returned} or self._is(node.func, names)
        if isinstance(node, ast.Subscript | ast.Await | ast.Starred | ast.NamedExpr):
            return self._is(node.value, names)
        if isinstance(node, ast.IfExp):
            return self._is(node.body, names) or self._is(node.orelse, names)
        if isinstance(node, ast.BoolOp):
            return any(self._is(value, names) for value in node.values)
        return False

    def _uses(self, node: ast.AST, names: set[str]) -> Iterator[Use]:
        if isinstance(node, ast.Attribute) and self._is(node.value, names) and node.attr not in _EVERYDAY:
            yield Use(node.attr, node.lineno)
        if not isinstance(node, ast.Call):
            return
        given = len([each for each in node.args if not isinstance(each, ast.Starred)])
        keywords = tuple(name for each in node.keywords for name in (
            [each.arg] if each.arg else self._keys(each.value.id) if isinstance(each.value, ast.Name) else []
        ))  # fmt: skip
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in self._hands_on:
            to, own = self._hands_on[called]
            yield Use(to, node.lineno, 0, tuple(each for each in keywords if each not in own))
        if isinstance(node.func, ast.Attribute) and self._is(node.func.value, names):
            if node.func.attr not in _EVERYDAY:
                yield Use(node.func.attr, node.lineno, given, keywords)
        elif isinstance(node.func, ast.Name) and node.func.id in self._imported:
            name, arguments = self._around
            for keyword in node.keywords:
                if keyword.arg is None and arguments.kwarg and ast.unparse(keyword.value) == arguments.kwarg.arg:
                    own = {one.arg for one in [*arguments.args, *arguments.kwonlyargs]}
                    self._hands_on[name] = self._imported[node.func.id], own
            yield Use(self._imported[node.func.id], node.lineno, given, keywords)
        elif isinstance(node.func, ast.Call) and getattr(node.func.func, "id", "") in self._returned:
            yield Use(self._returned[node.func.func.id], node.lineno, given, keywords)
        elif getattr(node.func, "id", "") in ("hasattr", "getattr") and self._is(node.args[0], names):
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value not in _EVERYDAY:
                yield Use(str(name.value), node.lineno)


def _any(annotation: ast.AST | None) -> bool:
    """Any, or something of Any; not a dict of ours."""
    return annotation is not None and ast.unparse(annotation) in (
        "Any", "Any | None", "list[Any]", "Iterator[Any]", "Sequence[Any]", "type[Any]",
    )  # fmt: skip


def _scopes(tree: ast.Module) -> Iterator[ast.AST]:
    """Functions and methods, each with all that is nested in it."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from (each for each in node.body if isinstance(each, Function))
