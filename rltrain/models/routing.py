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
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from rltrain.base.errors import ConfigError

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_GROUPS = ("n_group", "num_expert_group")


def num_experts(config: PretrainedConfig) -> int:
    """Experts of a layer, of which each token goes to some; 0 where a model has none."""
    settings = config.get_text_config().to_dict()
    return next((_first(settings[name]) for name in _COUNTS if settings.get(name)), 0)


def _first(number: int | list[int]) -> int:
    # HunYuan may have a number per layer.
    return number if isinstance(number, int) else max(number)


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
        self._is_around = False

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

    def recorded(self) -> Tensor:
        """What was chosen since `record`, which ends.

        Raises ConfigError for a model whose routers choose otherwise than by ``torch.topk``.
        """
        seen, self._seen = self._seen, None
        if not seen or not all(seen):
            raise ConfigError(
                "actor_rollout_ref.actor.router_replay.mode: the choice of a layer's experts could not be seen, since "
                "its router does not choose the largest scores. Leave router_replay out for this model."
            )
        return torch.stack([torch.cat(parts) for parts in seen], 1)

    def measure_load(self) -> None:
        """Begin to add up where tokens go in forwards under `counting`."""
        self._go_around()
        self._load = _Load(len(self._blocks), self.num_experts)

    @property
    def measures_load(self) -> bool:
        """Whether `measure_load` has begun."""
        return self._load is not None

    @contextmanager
    def counting(self, times: Tensor | None) -> Iterator[None]:
        """Count where the tokens of a forward go, each so many times [tokens]; None: not at all.

        A backward pass that computes activations again lies behind it, and counts nothing.
        """
        if times is None or self._load is None:
            yield
            return
        self._load.begin(times)
        try:
            yield
        finally:
            self._load.end()

    def load(self) -> Tensor | None:
        """How many tokens went to each expert [layers, experts] on this rank since `measure_load`, which ends. None
        where the routers choose otherwise than by ``torch.topk``."""
        load, self._load = self._load, None
        return load.total if load and load.covers_all else None

    def _go_around(self) -> None:
        """Stand around the blocks, where the choice is made and used, also when activations are computed again.

        Not before somebody asks for it: a layer that is compiled would be compiled with this.
        """
        for number, block in enumerate(() if self._is_around else self._blocks):
            block.forward = partial(self._run, block.forward, number)
        self._is_around = True

    def _run(self, forward: Callable[..., Any], number: int, *arguments: Any, **named: Any) -> Any:
        load = self._load if self._load and self._load.is_counting else None
        if self._given is None and self._seen is None and load is None:
            return forward(*arguments, **named)
        given = None if self._given is None else self._given[:, number].long()
        with _Choice(self.num_experts, self._num_groups, given) as choice:
            outputs = forward(*arguments, **named)
        if choice.made is not None:
            if self._seen is not None:
                self._seen[number].append(choice.made.to(self.dtype))
            if load is not None:
                load.count(number, choice.made.flatten())
        return outputs


class _Load:
    """Tokens of each expert, added up over forwards."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.total: Tensor | None = None
        """[layers, experts]."""
        self._layers: set[int] = set()
        self._shape = num_layers, num_experts
        # Of the forward under way.
        self._times: Tensor | None = None
        self._counts = torch.zeros(0)

    @property
    def covers_all(self) -> bool:
        """Whether every layer has shown where tokens go."""
        return len(self._layers) == self._shape[0]

    @property
    def is_counting(self) -> bool:
        return self._times is not None

    def begin(self, times: Tensor) -> None:
        # Floats, which every accelerator adds by index; whole numbers are exact in them up to 2^24.
        self._times, self._counts = times.float(), torch.zeros(self._shape, device=times.device)

    def count(self, layer: int, experts: Tensor) -> None:
        """experts: of all tokens, the chosen ones of each behind each other."""
        assert self._times is not None
        if len(self._times) != len(experts):  # once a forward
            self._times = self._times.repeat_interleave(len(experts) // len(self._times))
        self._counts[layer].index_add_(0, experts, self._times)
        self._layers.add(layer)

    def end(self) -> None:
        counts, self._times = self._counts.long(), None
        self.total = counts if self.total is None else self.total + counts


class _Choice(TorchFunctionMode):
    """Takes what ``torch.topk`` chooses among the scores of all experts [tokens, experts], or gives it ``given``."""

    def __init__(self, num_experts: int, num_groups: int, given: Tensor | None) -> None:
        super().__init__()
        self._num_experts, self._num_groups, self._given = num_experts, num_groups, given
        self.made: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2:
            return func(*args, **kwargs)
        scores, *rest = args
        if scores.shape[1] == self._num_experts:
            values, self.made = func(*args, **kwargs) if self._given is None else (None, self._given)
            # Gathered, so that the gradient of the scores goes the way it would.
            return torch.return_types.topk((scores.gather(1, self.made) if values is None else values, self.made))
        if scores.shape[1] == self._num_groups and self._given is not None:
            # Only experts of some groups may be chosen (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.2).
            groups = self._given // (self._num_experts // self._num_groups)
            scores = scores.scatter(1, groups, torch.inf)
        return func(scores, *rest, **kwargs)
