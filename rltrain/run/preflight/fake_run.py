"""What a model's passes hold on a device, learnt by running them on tensors that have no memory.

A formula for activations is wrong as soon as somebody changes the forward. So here the worker's own model, sharded by
FSDP2 over a process group that only pretends to be many ranks, runs forward, backward and optimizer step on fake
tensors, and a ledger adds up the storages that are alive. Memory is linear in equal layers, so a short model, and a
longer one for each kind of layer, tell that of a long one. torch's FSDPMemTracker finds the same total for one
micro-batch, but takes no second one, and cannot tell gathered weights from gradients in a backward. Left out: memory
that kernels take for themselves, and memory that an allocator loses between its blocks.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rltrain.base.columns.batch import Batch
from rltrain.base.device import DEVICES, Device
from rltrain.config.schema.model import OptimConfig
from rltrain.models import experts, forward
from rltrain.models.attention import delta_rule, recurrent, varlen
from rltrain.models.attention import packed as attention
from rltrain.models.attention.packing import PackedInputs, pack
from rltrain.models.attention.ulysses import sequence_group, share_of_row
from rltrain.models.forward import PackedModel, PolicyModel
from rltrain.models.optim import clip_gradients, make_optimizer
from rltrain.models.weights.shard import empty_packed, make_mesh, reshard, spread
from rltrain.models.weights.spec import ModelSpec
from rltrain.models.weights.state import moments

# Models with more layers are run with as many, and with twice as many. With two, FSDP gathers both at once.
_LAYERS = 3
# It takes as much as its input while it runs, which no operator within shows.
_TAKES_AS_MUCH = torch.ops.aten.logsumexp.default
Owners = Counter[str]


class Ledger(TorchDispatchMode):
    """Bytes of the storages that are alive, by owner, and those at their peak; real tensors of ``kind`` or fake ones.

    Whoever allocates sets ``owner``; `claim` corrects it. FSDP's gathered weights are told by its own methods.
    """

    def __init__(self, kind: str = "cpu") -> None:
        super().__init__()
        self.live: Owners = Counter()
        self.peak: Owners = Counter()
        self._owner, self._looks_away = "activations", False
        self._kind = kind
        self._held: dict[int, tuple[int, str, weakref.ref[Any]]] = {}

    @contextmanager
    def owner(self, name: str) -> Iterator[None]:
        """Storages that are made inside belong to ``name``."""
        before, self._owner = self._owner, name
        try:
            yield
        finally:
            self._owner = before

    def claim(self, owner: str, tensors: Iterable[Tensor], but: str = "") -> None:
        """The storages of ``tensors``, but those that belong to ``but``, are ``owner``'s from here on."""
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            if id(storage) in self._held and self._held[id(storage)][1] != but:
                self._forget(id(storage))
                self._hold(storage, owner)

    def cut(self) -> Owners:
        """What the peak since the last cut was made of."""
        found, self.peak = self.peak, Counter(self.live)
        return found

    def __enter__(self) -> Ledger:
        self._stack = ExitStack()
        resize = torch.UntypedStorage.resize_
        ledger = self

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            if id(storage) in ledger._held:
                owner = ledger._held[id(storage)][1]
                ledger._forget(id(storage))
                ledger._hold(storage, owner)
            return done

        # FSDP frees and takes the memory of gathered weights through their storages, which no operator shows.
        self._stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            self._stack.enter_context(patch.object(FSDPParamGroup, name, self._told(getattr(FSDPParamGroup, name))))
        # DTensor finds the shapes of a result by computing the whole of it with fake tensors.
        meta = "_propagate_tensor_meta_non_cached"
        self._stack.enter_context(
            patch.object(ShardingPropagator, meta, self._unseen(getattr(ShardingPropagator, meta)))
        )
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What a DTensor does to its own shard comes here by itself.
        if DTensor in types:
            return NotImplemented
        if func is _TAKES_AS_MUCH and isinstance(args[0], FakeTensor):
            self._hold(torch.empty_like(args[0]).untyped_storage(), self._owner)
        found = func(*args, **(kwargs or {}))
        for each in () if self._looks_away else tree_iter(found):
            if isinstance(each, Tensor) and each.device.type == self._kind:
                storage = each.untyped_storage()
                held = self._held.get(id(storage))
                if held is None or held[0] != storage.nbytes():
                    if held:
                        self._forget(id(storage))
                    self._hold(storage, self._owner)
        return found

    def _told(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            with self.owner("gathered"):
                found = method(*args, **kwargs)
            reduced = (each.sharded_param.grad for each in args[0].fsdp_params)
            self.claim("gradients", [each for each in reduced if each is not None])
            return found

        return told

    def _unseen(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def unseen(*args: Any, **kwargs: Any) -> Any:
            self._looks_away = True
            try:
                return method(*args, **kwargs)
            finally:
                self._looks_away = False

        return unseen

    def _hold(self, storage: Any, owner: str) -> None:
        key, size = id(storage), storage.nbytes()
        self._held[key] = size, owner, weakref.ref(storage, lambda _: self._forget(key))
        self.live[owner] += size
        if self.live.total() > self.peak.total():
            self.peak = Counter(self.live)

    def _forget(self, key: int) -> None:
        if key in self._held:
            size, owner, _ = self._held.pop(key)
            self.live[owner] -= size


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- a model without memory --------------------------------------------------------------------------------------------


@contextmanager
def fake_model(
    kind: type[Any], spec: ModelSpec, device: Device, num_ranks: int,
    kept: Mapping[int, Sequence[int]] | None = None, batch: Batch | None = None,
) -> Iterator[tuple[Any, Ledger, PackedInputs | None]]:  # fmt: skip
    """A role's model as the first of ``num_ranks`` ranks holds it, the ledger of what is alive, and a packed ``batch``.

    device: the one whose kernels and sizes count. kept: the layers of the model's lists, by their number; the others
    are whole. Inside, torch computes shapes alone. No process group may be there.
    """
    config = spec.load_config()
    packed = empty_packed(kind, spec, config)
    for number, layers in enumerate(layer_lists(packed)):
        for place in sorted(set(range(len(layers))).difference((kept or {}).get(number, range(len(layers)))))[::-1]:
            del layers[place]
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_pretended_ranks(num_ranks))
        inputs = None if batch is None else pack(batch, torch.device("cpu"))
        if spec.sequence_parallel_size > 1:
            packed.group = sequence_group(config, spec.sequence_parallel_size, "")
            # Which answers a rank has depends on numbers, which fake tensors have not.
            mine = None if inputs is None else share_of_row(inputs, packed.group)
            enter(patch.object(forward, "share_of_row", lambda *_: mine))
        spread(packed, spec, make_mesh(DEVICES["cpu"], spec.fsdp.fsdp_size, spec.fsdp.expert_parallel_size))
        enter(patch.object(experts, "row_sizes", _evenly))
        enter(patch.dict(DEVICES, cpu=replace(device, kind="cpu")))
        enter(patch.dict(sys.modules, torch_npu=_Kernels))
        stack.callback(_forget_tables)
        _forget_tables()
        enter(patch("torch.optim.adam._get_value", lambda step: 1))  # AdamW counts its steps
        enter(patch("torch.autograd.graph.save_on_cpu", _elsewhere))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        ledger = enter(Ledger())
        with ledger.owner("weights"):
            packed.to_empty(device="cpu")
        ledger.claim("weights", [*packed.parameters(), *packed.buffers()])
        ledger.cut()
        yield packed, ledger, inputs


def _elsewhere(**_: Any) -> saved_tensors_hooks:
    """In place of torch's save_on_cpu, as the device is a CPU here: what is saved takes no memory meanwhile."""
    return saved_tensors_hooks(
        lambda tensor: torch.empty_like(tensor, device="meta"), lambda saved: torch.empty_like(saved, device="cpu")
    )


def _evenly(chosen: Tensor, num_here: int, group: Any) -> tuple[list[int], list[int], Tensor]:
    """In place of `experts.row_sizes`: as many tokens go to each expert, as fake tensors have no numbers."""
    sizes = [len(range(rank, chosen.numel(), group.size())) for rank in range(group.size())]
    return sizes, [sizes[0]] * group.size(), torch.arange(sizes[0] * group.size()) % num_here


def _forget_tables() -> None:
    """Tensors that are made once must not be fake in one place and real in another."""
    for made in (
        attention._template, varlen._upper_triangle, recurrent._laid, recurrent._rounds, delta_rule._chunks,
    ):  # fmt: skip
        made.cache_clear()


@contextmanager
def _pretended_ranks(number: int) -> Iterator[None]:
    """A process group of which this process is rank 0, and whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


def layer_lists(packed: PackedModel) -> list[nn.ModuleList]:
    """The lists that hold the repeated layers: of the decoder, and of a tower."""
    names = set(packed.model._no_split_modules or ())
    lists = [each for each in packed.modules() if isinstance(each, nn.ModuleList) and len(each)]
    # FSDP makes classes of its own of them.
    return [each for each in lists if {type(layer).__name__.removeprefix("FSDP") for layer in each} <= names]


class _Attention(torch.autograd.Function):
    """What npu_fusion_attention takes and keeps: its inputs, the output, and two numbers of 8 x fp32 a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        rows = query.new_empty(2, *query.shape[:-1], 8, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


class _Kernels:
    """In place of torch_npu."""

    @staticmethod
    def npu_fusion_attention(query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> tuple[Tensor]:
        return (_Attention.apply(query, key, value),)


# -- what passes hold --------------------------------------------------------------------------------------------------

Work = Callable[[Any, Ledger, PackedInputs], list[Owners]]


def peak_of(kind: type[Any], spec: ModelSpec, device: Device, num_ranks: int, batch: Batch, work: Work) -> Owners:
    """Bytes by owner at the peak of ``work`` on ``batch``.

    ``work`` returns the peaks of its stretches. Within each of them memory is linear in the number of layers of a kind,
    so where there are many a short and a longer model tell it.
    """
    kinds = [_kinds(layers) for layers in layer_lists(empty_packed(kind, spec, spec.load_config()))]

    def stretches(kept: Mapping[int, Sequence[int]]) -> list[Owners]:
        with fake_model(kind, spec, device, num_ranks, kept, batch) as (packed, ledger, inputs):
            assert inputs is not None
            return work(packed, ledger, inputs)

    short = {
        place: sorted(one for layers in of_list for one in layers[:_LAYERS]) for place, of_list in enumerate(kinds)
    }
    base = stretches(short)
    found = [Counter(each) for each in base]
    for place, layers in ((place, layers) for place, of_list in enumerate(kinds) for layers in of_list):
        if more := layers[_LAYERS : 2 * _LAYERS]:
            longer_model = stretches(short | {place: sorted([*short[place], *more])})
            for sum_, least, longer in zip(found, base, longer_model, strict=True):
                for owner in set(least) | set(longer):
                    sum_[owner] += round((longer[owner] - least[owner]) * (len(layers) - _LAYERS) / len(more))
    return max(found, key=Counter.total)


def _kinds(layers: nn.ModuleList) -> list[list[int]]:
    """The places of layers whose weights have the same names and sizes. The first layers of many families are dense."""
    places: dict[object, list[int]] = {}
    for place, layer in enumerate(layers):
        sizes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
        places.setdefault(sizes, []).append(place)
    return list(places.values())


def forward_only(with_entropy: bool) -> Work:
    """A pass without gradients."""

    def work(packed: Any, ledger: Ledger, inputs: PackedInputs) -> list[Owners]:
        packed.eval()
        with torch.no_grad():
            found = packed(inputs, 1.0, with_entropy) if isinstance(packed, PolicyModel) else packed(inputs)
        del found
        reshard(packed)
        return [ledger.cut()]

    return work


def update(
    optim: OptimConfig, num_micro_batches: int, with_entropy: bool, entropy_learns: bool, once: bool = False
) -> Work:
    """Forward and backward of up to two micro-batches, of which the second finds gradients, and a step of AdamW.

    once: gradients are reduced after the last alone.
    """

    def work(packed: Any, ledger: Ledger, inputs: PackedInputs) -> list[Owners]:
        packed.train()
        trained = [each for each in packed.parameters() if each.requires_grad]
        optimizer = make_optimizer(trained, optim, replace(DEVICES["cpu"], fused_optimizer=False))
        for group in optimizer.param_groups:
            group["foreach"] = True  # as on accelerators
        with ledger.owner("optimizer"):
            for each in trained:
                moments(optimizer, each)
        stretches: list[Owners] = []
        first = next(iter(layer_lists(packed)[-1]))
        # In front of it most layers are done, and what they kept is gone: the peak is before or after.
        first.register_forward_hook(lambda _, __, output: _at_gradient(output, lambda: stretches.append(ledger.cut())))
        ledger.cut()
        num_run = min(num_micro_batches, 2)
        for number in range(1, num_run + 1):
            packed.set_requires_gradient_sync(number == num_run or not once)
            if isinstance(packed, PolicyModel):
                log_probs, entropy, *_ = packed(inputs, 1.0, with_entropy)
                loss = log_probs.sum() + (entropy.sum() if entropy_learns else 0.0)
                del log_probs, entropy
            else:
                loss = packed(inputs).square().sum()
            stretches.append(ledger.cut())
            loss.backward()
            del loss
            stretches.append(ledger.cut())
        clip_gradients(trained, optim.clip_grad)
        optimizer.step()
        return [*stretches, ledger.cut()]

    return work


def _at_gradient(output: Any, tell: Callable[[], object]) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    if hidden.requires_grad:
        hidden.register_hook(lambda _: tell())
