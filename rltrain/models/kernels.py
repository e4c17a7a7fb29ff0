"""Fused RMSNorm, SwiGLU and rotary embedding. transformers implements each as five to ten element-wise operators, every
one of which reads and writes all states. The kernels of torch_npu or Liger replace them. Modules are matched by
structure instead of class names: each candidate is run once on a few random numbers and replaced only if it computes
the formula. Other modules are left unchanged, for example if they have another activation, a clamp, or a bias in the
norm.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rltrain.common.device import Device, torch_npu
from rltrain.common.errors import ConfigError

log = logging.getLogger(__name__)
_ROTARY = "apply_rotary_pos_emb"
_TOLERANCE = 1e-5


class Kernels(NamedTuple):
    """Differentiable kernels. They are rms_norm(x [..., n], weight [n], eps); swiglu(gate, up), with arguments of equal
    shape; rotary(query, key, cos, sin, unsqueeze_dim), with the arguments and results of transformers' function.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute w x / sqrt(mean(x^2) + eps)   (Zhang & Sennrich 2019, eq. 4), in fp32."""
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up   (Shazeer 2020, eq. 6)."""
    return nn.functional.silu(gate) * up


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Compute x cos + (-x2, x1) sin; x1, x2: halves of each head   (Su et al. 2021, eq. 34, in Llama's order)."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turned(query), turned(key)


PLAIN = Kernels(rms_norm, swiglu, rotary)


def torch_npu_kernels() -> Kernels:
    """Return the kernels of torch_npu. Not run on hardware."""
    npu = torch_npu()

    def npu_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return npu.npu_rotary_mul(query, cos, sin), npu.npu_rotary_mul(key, cos, sin)

    return Kernels(
        lambda x, weight, eps: npu.npu_rms_norm(x, weight.to(x.dtype), epsilon=eps)[0],
        lambda gate, up: npu.npu_swiglu(torch.cat([gate, up], -1), dim=-1),
        npu_rotary,
    )


def liger_kernels() -> Kernels:
    """Return Liger's kernels, for CUDA. Not run on hardware. Raises ConfigError if the package is missing."""
    try:
        from liger_kernel.transformers import functional as liger
    except ImportError as error:
        raise ConfigError(
            f"actor_rollout_ref.model.use_liger=True needs Liger's kernels: pip install 'rltrain[liger]' ({error})."
        ) from error
    return Kernels(
        # The in-place backward pass would overwrite a gradient that may be used elsewhere.
        lambda x, weight, eps: liger.liger_rms_norm(x, weight, eps, in_place=False),
        liger.liger_swiglu,
        lambda query, key, cos, sin, dim: liger.liger_rope(query, key, cos, sin, unsqueeze_dim=dim),
    )


def kernels_of(device: Device, wanted: bool) -> Kernels | None:
    """Return the fused kernels of a device, or None. A CPU has none."""
    make = {"npu": torch_npu_kernels, "cuda": liger_kernels}.get(device.kind) if wanted else None
    return make() if make else None


def fuse(model: PreTrainedModel, kernels: Kernels) -> Counter[str]:
    """Replace the norms, MLPs and rotary embeddings of ``model`` by ``kernels``. Returns their numbers by name.

    The model may be on the meta device. The rotary function is replaced in the modeling file, and thus for all models
    of the process. On a CPU it calls the original.
    """
    counts: Counter[str] = Counter()
    replacements: dict[tuple[Any, ...], Any] = {}
    for module in model.modules():
        for replace, shape in ((_norm, _norm_shape(module)), (_mlp, _mlp_shape(module))):
            if shape is None:
                continue
            key = (type(module), *shape)
            if key not in replacements:
                replacements[key] = _attempt(replace, module)
            if replacements[key] is not None:
                module.forward = replacements[key](module, kernels)
                counts[type(module).__name__] += 1
    for name in {type(module).__module__ for module in model.modules()}:
        counts[f"{name.rpartition('.')[2]}.{_ROTARY}"] += _replace_rotary(sys.modules.get(name), kernels)
    counts += Counter()  # drops counts of 0
    log.info(
        "fused kernels: %s", ", ".join(f"{count} {name}" for name, count in counts.items()) or "none fits the model"
    )
    return counts


Fused = Callable[[Any, Kernels], Callable[..., Tensor]]


def _attempt(replace: Callable[[Any], Fused | None], module: nn.Module) -> Fused | None:
    """Return the replacement for modules like this one, or None if they compute another formula."""
    try:
        with torch.no_grad():
            return replace(module)
    except Exception as error:  # noqa: BLE001 - code of any model: modules that fail stay unchanged
        log.debug("%s is left as it is: %r", type(module).__name__, error)
        return None


def _agree(result: Tensor, expected: Tensor) -> bool:
    return result.shape == expected.shape and torch.allclose(result, expected, _TOLERANCE, _TOLERANCE)


def _numbers(*shape: int) -> Tensor:
    """Return fixed normal numbers (mean 0, std 3) without using the run's generator."""
    generator = torch.Generator().manual_seed(1)
    return torch.empty(shape, device="cpu").normal_(0, 3, generator=generator)


def _norm_shape(module: nn.Module) -> tuple[Any, ...] | None:
    weights = dict(module.named_parameters())
    if not type(module).__name__.endswith("RMSNorm") or set(weights) != {"weight"} or weights["weight"].dim() != 1:
        return None
    return len(weights["weight"]), _eps(module)


def _eps(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", None) or module.eps)


def _norm(module: Any) -> Fused | None:
    trial, x = copy.copy(module), _numbers(2, len(module.weight))
    trial._parameters = {"weight": nn.Parameter(_numbers(len(module.weight)), requires_grad=False)}
    # Gemma's families multiply by 1 + weight, which half precision would round, so they are not replaced.
    return _norm_forward if _agree(type(module).forward(trial, x), rms_norm(x, trial.weight, _eps(module))) else None


def _norm_forward(module: Any, kernels: Kernels) -> Callable[..., Tensor]:
    plain, eps = module.forward, _eps(module)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:  # for example the gate of a gated norm
            return plain(x, *args, **kwargs)
        return kernels.rms_norm(x, module.weight, eps)

    return forward


def _mlp_shape(module: nn.Module) -> tuple[Any, ...] | None:
    names = tuple(name for name, _ in module.named_children())
    projections = {name for name in names if name.endswith("_proj")}
    if projections not in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}) or module._parameters:
        return None
    return (names,)


def _mlp(module: Any) -> Fused | None:
    # Try a copy with small initialized projections, because the projections of the model may have no weights yet.
    trial, width = copy.copy(module), 4
    parts = {name: part for name, part in module.named_children() if not name.endswith("_proj")}
    sizes = {"gate_up_proj": (width, 2 * width)}
    for name, _ in module.named_children():
        if name.endswith("_proj"):
            parts[name] = nn.Linear(*sizes.get(name, (width, width)), device="cpu")
            parts[name].weight.copy_(_numbers(*parts[name].weight.shape))
    trial._modules = parts
    x = _numbers(2, width)
    if not _agree(type(module).forward(trial, x), _mlp_forward(trial, PLAIN)(x)):
        return None
    return _mlp_forward


def _mlp_forward(module: Any, kernels: Kernels) -> Callable[..., Tensor]:
    if "gate_up_proj" in module._modules:
        halves = lambda x: (half.contiguous() for half in module.gate_up_proj(x).chunk(2, -1))  # noqa: E731
        return lambda x: module.down_proj(kernels.swiglu(*halves(x)))
    return lambda x: module.down_proj(kernels.swiglu(module.gate_proj(x), module.up_proj(x)))


def _replace_rotary(modeling: Any, kernels: Kernels) -> int:
    plain = getattr(modeling, _ROTARY, None)
    plain = getattr(plain, "_plain", plain)
    if plain is None or list(inspect.signature(plain).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return 0
    query, key, cos = _numbers(1, 2, 3, 8), _numbers(1, 1, 3, 8), _numbers(1, 3, 4)
    # Both halves of a head use the same angles.
    cos, sin = torch.cat([cos, cos], -1), torch.cat([cos + 1, cos + 1], -1)
    try:
        same = all(map(_agree, plain(query, key, cos, sin), rotary(query, key, cos, sin)))
    except Exception as error:  # noqa: BLE001 - see `_attempt`
        log.debug("%s of %s is not patched: %r", _ROTARY, modeling.__name__, error)
        return 0
    if not same:
        return 0

    @wraps(plain)
    def fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Fall back for families that rotate only part of a head, because the trial does not detect this.
        if q.is_cpu or args or set(kwargs) - {"unsqueeze_dim"} or cos.shape[-1] != q.shape[-1]:
            return plain(q, k, cos, sin, *args, **kwargs)
        return kernels.rotary(q, k, cos, sin, kwargs.get("unsqueeze_dim", 1))

    fused._plain = plain  # type: ignore[attr-defined]
    setattr(modeling, _ROTARY, fused)
    return 1
