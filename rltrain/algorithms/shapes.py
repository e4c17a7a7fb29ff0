"""Shapes and dtypes of tensors in the signatures of this folder; the tests check them in every call (jaxtyping)."""

from __future__ import annotations

from typing import TypeAlias

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Scalar: TypeAlias = Float[Tensor, ""]
PerToken: TypeAlias = Float[Tensor, "tokens"]
TokenMask: TypeAlias = Bool[Tensor, "tokens"]
NumberOrMask: TypeAlias = Shaped[Tensor, "tokens"]
PerResponse: TypeAlias = Float[Tensor, "n"]
ResponseMask: TypeAlias = Bool[Tensor, "n"]
ResponseInts: TypeAlias = Int[Tensor, "n"]
Distributions: TypeAlias = Float[Tensor, "tokens vocabulary"]
