"""Routing of tokens to experts: recorded in one pass and replayed in another.

A router's choice is a step function of its input. Different rounding in two passes (different kernels, micro-batches or
engine precision) sends a few tokens of every layer to different experts, and their log-probs then differ by more than
rounding. If the choice of an earlier pass is replayed (Zheng et al. 2025, arXiv 2507.18071, section 5.3; for the choice
of the engine: Ma et al. 2025, arXiv 2510.11370), the weights of the chosen experts still come from the router, which
keeps its gradient.

Every family has its own router, but most select the largest scores by ``torch.topk`` and use only its result. Therefore
the call is intercepted, and no router has to be reimplemented here. Routers that select differently cannot be recorded,
which is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from rltrain.common.errors import ConfigError

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid)
_SHARES = (torch.softmax, Tensor.softmax, functional.softmax, *_SIGMOIDS)
_GROUPS = ("n_group", "num_expert_group")
CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")


def num_experts(config: PretrainedConfig) -> int:
    """Return the number of experts per layer; 0 for a model without experts."""
    settings = config.get_text_config().to_dict()
    return next((_first(settings[name]) for name in _COUNTS if settings.get(name)), 0)


def _first(number: int | list[int]) -> int:
    # HunYuan's config may have a separate number for each layer.
    return number if isinstance(number, int) else max(number)


def correction_biases(model: nn.Module) -> dict[str, Tensor]:
    """Return the correction biases of routers: one buffer [experts] per layer, by name and in the order of the layers.

    Some families add them to the scores for selecting experts, but not for weighting them (DeepSeek-AI 2024, V3, eq.
    16). Biases that are parameters (ERNIE 4.5) are excluded: FSDP shards them, and rounds them in the forward pass.
    """
    return {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in CORRECTION_BIASES}


def unseen(key: str) -> ConfigError:
    """Return the error for a model whose routers do not expose the choices that ``key`` needs."""
    return ConfigError(
        f"{key}: this model's router does not choose the largest scores, so its router indices are unknown. Leave it "
        "out for this model."
    )


class Routing:
    """Expert choices of all layers with experts of ``model``, in the order of the layers.

    A choice is [tokens, layers, experts per token] in `dtype`.
    """

    def __init__(self, model: nn.Module, config: PretrainedConfig) -> None:
        self.num_experts = num_experts(config)
        settings = config.get_text_config().to_dict()
        self._num_groups = next((settings[name] for name in _GROUPS if settings.get(name)), 1)
        self._blocks = [part for part in model.modules() if isinstance(getattr(part, "experts", None), nn.Module)]
        self._given: Tensor | None = None
        self._seen: list[list[Tensor]] | None = None
        self._load: _Load | None = None
        self._weights: Tensor | None = None
        self._times = torch.zeros(0)
        self._terms: list[Tensor] = []
        self._is_forward = False
        self._is_around = False

    @property
    def num_layers(self) -> int:
        """Number of layers with experts."""
        return len(self._blocks)

    @property
    def dtype(self) -> torch.dtype:
        """Narrowest integer dtype for expert indices."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    def replay(self, choice: Tensor | None) -> None:
        """Use these experts in all later forwards and their recomputations. None: the router decides."""
        if choice is not None:
            self._go_around()
        self._given = choice

    def record(self) -> None:
        """Start recording choices."""
        self._go_around()
        self._seen = [[] for _ in self._blocks]

    def recorded(self, key: str = "actor_rollout_ref.actor.router_replay.mode") -> Tensor:
        """Return the choices since `record`, and stop recording.

        Raises ConfigError, which names ``key``, for a model whose routers do not use ``torch.topk``.
        """
        seen, self._seen = self._seen, None
        if not seen or not all(seen):
            raise unseen(key)
        return torch.stack([torch.cat(parts) for parts in seen], 1)

    def measure_load(self) -> None:
        """Start counting the tokens of each expert in forwards under `counting`."""
        self._go_around()
        self._load = _Load(len(self._blocks), self.num_experts)

    def balance(self, weights: Tensor | None) -> None:
        """Make forwards under `counting` compute `balance_loss`. weights: [layers, experts], or None to disable."""
        self._go_around()
        self._weights = weights

    @property
    def counts(self) -> bool:
        """True if forwards with gradients should run under `counting`."""
        return self._load is not None or self._weights is not None

    @contextmanager
    def counting(self, times: Tensor | None) -> Iterator[None]:
        """Count the experts of the tokens in a forward. times [tokens]: how often each token counts (None: do not
        count).

        Recomputation in the backward pass is outside of this context, and is not counted.
        """
        if times is None:
            yield
            return
        # Counts are floats, because every accelerator supports index_add on them. They represent integers up to 2^24
        # exactly.
        self._times, self._terms, self._is_forward = times.float(), [], True
        if self._load:
            self._load.begin(self._times)
        try:
            yield
        finally:
            self._is_forward = False
            if self._load:
                self._load.end()

    def balance_loss(self) -> Tensor | None:
        """Return the load-balancing loss of the last forward under `counting`.

        It is the sum over layers, experts and tokens of weight x times x share.

        The router's shares of all experts sum to 1 per token. Only the shares have a gradient. Returns None if
        `balance` has set no weights.
        """
        terms, self._terms = self._terms, []
        return torch.stack(terms).sum() if terms else None

    def load(self) -> Tensor | None:
        """Return the tokens of each expert [layers, experts] on this rank since `measure_load`, and stop counting.

        None if the routers do not use ``torch.topk``.
        """
        load = self.load_so_far()
        self._load = None
        return load

    def load_so_far(self) -> Tensor | None:
        """Return the counts like `load`, without stopping."""
        return self._load.total if self._load and self._load.covers_all else None

    def _go_around(self) -> None:
        """Wrap the forward of the blocks that make and use the choice, so that recomputation is included. This is done
        on demand, because compiled layers would be compiled with the wrapper.
        """
        for number, block in enumerate(() if self._is_around else self._blocks):
            block.forward = partial(self._run, block.forward, number)
        self._is_around = True

    def _run(self, forward: Callable[..., Any], number: int, *arguments: Any, **named: Any) -> Any:
        load = self._load if self._is_forward else None
        # If the backward pass recomputes activations, it must compute the balance term again too.
        weights = self._weights if torch.is_grad_enabled() else None
        if self._given is None and self._seen is None and load is None and weights is None:
            return forward(*arguments, **named)
        given = None if self._given is None else self._given[:, number].long()
        with _Choice(self.num_experts, self._num_groups, given, with_shares=weights is not None) as choice:
            outputs = forward(*arguments, **named)
        if choice.made is None:
            return outputs
        if self._seen is not None:
            self._seen[number].append(choice.made.to(self.dtype))
        if load is not None:
            load.count(number, choice.made.flatten())
        if weights is not None and choice.shares is not None:
            term = (self._times @ choice.shares.float() * weights[number]).sum()
            self._terms += [term] if self._is_forward else []
        return outputs


class _Load:
    """Token counts per expert, summed over forwards."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.total: Tensor | None = None
        """[layers, experts]."""
        self._layers: set[int] = set()
        self._shape = num_layers, num_experts
        # Numbers of the current forward pass.
        self._times = self._counts = torch.zeros(0)

    @property
    def covers_all(self) -> bool:
        """True if every layer has been counted."""
        return len(self._layers) == self._shape[0]

    def begin(self, times: Tensor) -> None:
        self._times, self._counts = times, torch.zeros(self._shape, device=times.device)

    def count(self, layer: int, experts: Tensor) -> None:
        """Count ``experts``: the flattened choices of all tokens."""
        if len(self._times) != len(experts):  # once per forward
            self._times = self._times.repeat_interleave(len(experts) // len(self._times))
        self._counts[layer].index_add_(0, experts, self._times)
        self._layers.add(layer)

    def end(self) -> None:
        counts = self._counts.long()
        self.total = counts if self.total is None else self.total + counts


class _Choice(TorchFunctionMode):
    """Interceptor of ``torch.topk`` over expert scores [tokens, experts]: it records the choice or returns
    ``given``."""

    def __init__(self, num_experts: int, num_groups: int, given: Tensor | None, *, with_shares: bool) -> None:
        super().__init__()
        self._num_experts, self._num_groups, self._given = num_experts, num_groups, given
        # Shares are computed on demand only, because recomputation in the backward pass must save the same number of
        # tensors as the forward pass.
        self._with_shares = with_shares
        self.made: Tensor | None = None
        self.shares: Tensor | None = None
        """Router's share of each expert per token [tokens, experts]: softmax, or sigmoids divided by their sum
        (DeepSeek-AI 2024, V3, eq. 18).
        """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = self._with_shares and self.made is None
        if func in _SHARES and asked and args[0].dim() == 2 and args[0].shape[1] == self._num_experts:
            self.shares = outputs = func(*args, **kwargs)
            if func in _SIGMOIDS:
                self.shares = outputs / outputs.sum(1, keepdim=True)
            return outputs
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2:
            return func(*args, **kwargs)
        scores, *rest = args
        if scores.shape[1] == self._num_experts:
            # Some routers select by logits and compute no shares, so the shares are computed here.
            self.shares = scores.float().softmax(1) if asked and self.shares is None else self.shares
            values, self.made = func(*args, **kwargs) if self._given is None else (None, self._given)
            # The values are gathered from the scores, so that the scores keep their gradient.
            return torch.return_types.topk((scores.gather(1, self.made) if values is None else values, self.made))
        if scores.shape[1] == self._num_groups and self._given is not None:
            # Only experts of some groups may be chosen (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.2), so the
            # groups of the replayed experts must win.
            groups = self._given // (self._num_experts // self._num_groups)
            scores = scores.scatter(1, groups, torch.inf)
        return func(scores, *rest, **kwargs)
