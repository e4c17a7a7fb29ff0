"""Check the shapes and dtypes in the annotations of `rltrain.algorithms` in every call of a test."""

import inspect
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from jaxtyping import AbstractArray


def check(function):
    """Type checker for `jaxtyping`, which calls the result with the arguments of ``function``. Raises TypeError."""
    signature = inspect.signature(function)

    def checked(*args, **kwargs):
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            parameter = signature.parameters[name]
            values = value.values() if parameter.kind == parameter.VAR_KEYWORD else [value]
            if not all(has_shape(each, parameter.annotation) for each in values):
                raise TypeError(f"{name} is not {parameter.annotation}")

    return checked


def has_shape(value: Any, hint: Any) -> bool:
    """Return False if a tensor within ``value`` has another shape or dtype than ``hint`` states."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(value is None if each is type(None) else has_shape(value, each) for each in inner)
    if inspect.isclass(kind) and issubclass(kind, Mapping):
        return all(has_shape(each, inner[1]) for each in value.values())
    if kind is tuple and ... not in inner:
        return all(map(has_shape, value, inner))
    return not (inspect.isclass(hint) and issubclass(hint, AbstractArray)) or isinstance(value, hint)
