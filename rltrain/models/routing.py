"""Which experts the tokens of a model go to: recorded in one pass, and replayed in another.

A router's choice is a step function of its input, so what rounds differently in two passes (other kernels, other
micro-batches, an engine's own precision) sends a few tokens of every layer to other experts, and their log-probs differ
by more than rounding. Replaying the choice of an earlier pass (Zheng et al. 2025, arXiv 2507.18071, section 5.3; of the
engine: Ma et al. 2025, arXiv 2510.11370) leaves the weights of the chosen experts to the router, whose gradient stays.

Every family writes its router itself, but most choose the largest scores by ``torch.topk`` and go on from its result
alone. So the call is intercepted, and no family needs a copy of its router here. One that chooses in another way has
nothing recorded, and is refused.
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

from rltrain.base.errors import ConfigError

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid)
_SHARES = (torch.softmax, Tensor.softmax, functional.softmax, *_SIGMOIDS)
_GROUPS = ("n_group", "num_expert_group")
CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")


def num_experts(config: PretrainedConfig) -> int:
    """Experts of a layer, of which each token goes to some; 0 where a model has none."""
    settings = config.get_text_config().to_dict()
    return next((_first(settings[name]) for name in _COUNTS if settings.get(name)), 0)


def _first(number: int | list[int]) -> int:
    # HunYuan may have a number per layer.
    return number if isinstance(number, int) else max(number)


def correction_biases(model: nn.Module) -> dict[str, Tensor]:
    """What the routers of some families add to their scores where they choose, and not where they weigh (DeepSeek-AI
    2024, V3, eq. 16): a buffer [experts] of each layer with experts, by name and in the order of the layers.

    Left out: those that are parameters (ERNIE 4.5), which FSDP cuts, and rounds in the forward pass.
    """
    return {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in CORRECTION_BIASES}


def unseen(key: str) -> ConfigError:
    """``key`` needs the choice of experts of a model whose routers do not show it."""
    return ConfigError(
        f"{key}: the choice of a layer's experts could not be seen, since its router does not choose the "
        "largest scores. Leave it out for this model."
    )


class Routing:
    """The choices of all layers with experts of ``model``, in the order of the layers.

    A choice is [tokens, layers, experts per token] in the narrowest unsigned integers that hold every expert's number.
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
        """Those with experts."""
        return len(self._blocks)

    @property
    def dtype(self) -> torch.dtype:
        """Of a choice."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    def replay(self, choice: Tensor | None) -> None:
        """Have all forwards from now on go to these experts, and the backward passes that recompute them; None: to
        those that the router chooses."""
        if choice is not None:
            self._go_around()
        self._given = choice

    def record(self) -> None:
        """Begin to note what is chosen."""
        self._go_around()
        self._seen = [[] for _ in self._blocks]

    def recorded(self, key: str = "actor_rollout_ref.actor.router_replay.mode") -> Tensor:
        """What was chosen since `record`, which ends.

        Raises ConfigError, which names ``key``, for a model whose routers choose otherwise than by ``torch.topk``.
        """
        seen, self._seen = self._seen, None
        if not seen or not all(seen):
            raise unseen(key)
        return torch.stack([torch.cat(parts) for parts in seen], 1)

    def measure_load(self) -> None:
        """Begin to add up where tokens go in forwards under `counting`."""
        self._go_around()
        self._load = _Load(len(self._blocks), self.num_experts)

    def balance(self, weights: Tensor | None) -> None:
        """Have forwards under `counting` make `balance_loss`, with these weights [layers, experts]; None: not."""
        self._go_around()
        self._weights = weights

    @property
    def counts(self) -> bool:
        """Whether a forward with gradients is to be made under `counting`."""
        return self._load is not None or self._weights is not None

    @contextmanager
    def counting(self, times: Tensor | None) -> Iterator[None]:
        """Count where the tokens of a forward go, each so many times [tokens]; None: not at all.

        A backward pass that computes activations again lies behind it, and counts nothing.
        """
        if times is None:
            yield
            return
        # Floats, which every accelerator adds by index; whole numbers are exact in them up to 2^24.
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
        """Of the newest forward under `counting`: sum over layers, experts and tokens of weight x times x share, where
        the shares that the router gives all experts add up to 1 for a token. They alone have a gradient. None where
        there are no weights."""
        terms, self._terms = self._terms, []
        return torch.stack(terms).sum() if terms else None

    def load(self) -> Tensor | None:
        """How many tokens went to each expert [layers, experts] on this rank since `measure_load`, which ends. None
        where the routers choose otherwise than by ``torch.topk``."""
        load = self.load_so_far()
        self._load = None
        return load

    def load_so_far(self) -> Tensor | None:
        """The same, and counting goes on."""
        return self._load.total if self._load and self._load.covers_all else None

    def _go_around(self) -> None:
        """Stand around the blocks, where the choice is made and used, also when activations are computed again.

        Not before somebody asks for it: a layer that is compiled would be compiled with this.
        """
        for number, block in enumerate(() if self._is_around else self._blocks):
            block.forward = partial(self._run, block.forward, number)
        self._is_around = True

    def _run(self, forward: Callable[..., Any], number: int, *arguments: Any, **named: Any) -> Any:
        load = self._load if self._is_forward else None
        # A backward pass that computes activations again has to compute this again too.
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
    """Tokens of each expert, added up over forwards."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.total: Tensor | None = None
        """[layers, experts]."""
        self._layers: set[int] = set()
        self._shape = num_layers, num_experts
        # Of the forward under way.
        self._times = self._counts = torch.zeros(0)

    @property
    def covers_all(self) -> bool:
        """Whether every layer has shown where tokens go."""
        return len(self._layers) == self._shape[0]

    def begin(self, times: Tensor) -> None:
        self._times, self._counts = times, torch.zeros(self._shape, device=times.device)

    def count(self, layer: int, experts: Tensor) -> None:
        """experts: of all tokens, the chosen ones of each behind each other."""
        if len(self._times) != len(experts):  # once a forward
            self._times = self._times.repeat_interleave(len(experts) // len(self._times))
        self._counts[layer].index_add_(0, experts, self._times)
        self._layers.add(layer)

    def end(self) -> None:
        counts = self._counts.long()
        self.total = counts if self.total is None else self.total + counts


class _Choice(TorchFunctionMode):
    """Takes what ``torch.topk`` chooses among the scores of all experts [tokens, experts], or gives it ``given``."""

    def __init__(self, num_experts: int, num_groups: int, given: Tensor | None, *, with_shares: bool) -> None:
        super().__init__()
        self._num_experts, self._num_groups, self._given = num_experts, num_groups, given
        # Only if asked, as a backward pass that computes activations again has to save as many tensors.
        self._with_shares = with_shares
        self.made: Tensor | None = None
        self.shares: Tensor | None = None
        """What the router gives each expert of a token [tokens, experts]: its softmax, or its sigmoids over their sum
        (DeepSeek-AI 2024, V3, eq. 18)."""

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
            # Some routers choose among logits.
            self.shares = scores.float().softmax(1) if asked and self.shares is None else self.shares
            values, self.made = func(*args, **kwargs) if self._given is None else (None, self._given)
            # Gathered, so that the gradient of the scores goes the way it would.
            return torch.return_types.topk((scores.gather(1, self.made) if values is None else values, self.made))
        if scores.shape[1] == self._num_groups and self._given is not None:
            # Only experts of some groups may be chosen (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.2).
            groups = self._given // (self._num_experts // self._num_groups)
            scores = scores.scatter(1, groups, torch.inf)
        return func(scores, *rest, **kwargs)
