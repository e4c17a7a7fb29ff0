"""Memory of a model's passes on a device, measured by running them on fake tensors.

A formula for activations would be wrong as soon as the forward changes. So here the worker's model, sharded by FSDP2
over a fake process group, runs forward, backward and optimizer step on fake tensors, and a ledger sums the live
storages. Memory is linear in the number of equal layers, so a short model, and a longer one for each layer type, give
the memory of a long one. torch's FSDPMemTracker finds the same total for one micro-batch, but supports no second one,
and cannot distinguish gathered weights from gradients in a backward. Workspaces of kernels and fragmentation are not
counted.
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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rltrain.common.columns.batch import Batch
from rltrain.common.device import DEVICES, Device
from rltrain.config.schema.model import OptimConfig
from rltrain.models import experts, forward, layerwise_adamw
from rltrain.models.attention import delta_rule, recurrent, varlen
from rltrain.models.attention import packed as attention
from rltrain.models.attention.packing import PackedInputs, pack
from rltrain.models.attention.ulysses import share_of_row
from rltrain.models.forward import PackedModel, PolicyModel
from rltrain.models.optim import clip_gradients, make_optimizer
from rltrain.models.weights import lora
from rltrain.models.weights.shard import empty_packed, join_sequences, local_shard, make_mesh, reshard, spread
from rltrain.models.weights.spec import ModelSpec
from rltrain.models.weights.state import moments

# Longer models are run with this many layers and with twice as many. With only two layers, FSDP gathers both at once.
_LAYERS = 3
# This operator needs as much extra memory as its input, which its inner operators do not show.
_TAKES_AS_MUCH = torch.ops.aten.logsumexp.default
Owners = Counter[str]


class Ledger(TorchDispatchMode):
    """Bytes of live storages by owner, now and at their peak; real tensors of device ``kind`` or fake ones.

    `owner` sets the owner of new storages; `claim` changes it. Hooks on FSDP's methods recognise gathered weights.
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
        """Assign storages created in the body to ``name``."""
        before, self._owner = self._owner, name
        try:
            yield
        finally:
            self._owner = before

    def claim(self, owner: str, tensors: Iterable[Tensor], but: str = "") -> None:
        """Assign the storages of ``tensors`` to ``owner``, except those owned by ``but``."""
        for tensor in tensors:
            storage = local_shard(tensor).untyped_storage()
            if id(storage) in self._held and self._held[id(storage)][1] != but:
                self._forget(id(storage))
                self._hold(storage, owner)

    def cut(self) -> Owners:
        """Return the bytes by owner at the peak since the last cut, and start a new peak."""
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

        # FSDP frees and allocates gathered weights by resizing their storages, and no operator is called for that.
        self._stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            self._stack.enter_context(patch.object(FSDPParamGroup, name, self._told(getattr(FSDPParamGroup, name))))
        # Not counted: DTensor infers the shape of a result by computing all of it on fake tensors.
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
        # Not counted, because the operation on the local shard is dispatched here separately.
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


# -- a model without memory --------------------------------------------------------------------------------------------


@contextmanager
def fake_model(
    kind: type[Any], spec: ModelSpec, device: Device, num_ranks: int,
    kept: Mapping[int, Sequence[int]] | None = None, batch: Batch | None = None,
) -> Iterator[tuple[Any, Ledger, PackedInputs | None]]:  # fmt: skip
    """Yield the model of the first rank, a ledger of its live storages, and the packed ``batch``.

    device: the device whose kernels and sizes count. kept: layers to keep, by the number of the layer list; other lists
    are complete. In the body torch computes only shapes. No process group may exist.
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
            join_sequences(packed, spec, config)
            # The number of a rank's responses depends on values, which fake tensors do not have.
            mine = None if inputs is None else share_of_row(inputs, packed.group)
            enter(patch.object(forward, "share_of_row", lambda *_: mine))
        sizes = spec.fsdp.expert_parallel_size, spec.tensor_size
        spread(packed, spec, make_mesh(DEVICES["cpu"], spec.fsdp.fsdp_size, *sizes))
        enter(patch.object(experts, "row_sizes", _evenly))
        enter(patch.object(lora, "compute_local_shape_and_global_offset", _own_rows))
        enter(patch.dict(DEVICES, cpu=replace(device, kind="cpu")))
        enter(patch.dict(sys.modules, torch_npu=_Kernels))
        stack.callback(_forget_tables)
        _forget_tables()
        # AdamW counts its steps in a tensor.
        enter(patch("torch.optim.adam._get_value", lambda step: 1))
        enter(patch.object(layerwise_adamw, "_count", lambda step: 1))
        enter(patch.object(layerwise_adamw, "host_memory", lambda tensors, _: tensors))  # on the meta device
        enter(patch("torch.autograd.graph.save_on_cpu", _elsewhere))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        ledger = enter(Ledger())
        with ledger.owner("weights"):
            packed.to_empty(device="cpu")
        ledger.claim("weights", [*packed.parameters(), *packed.buffers()])
        if device.attention == "npu":
            varlen._upper_triangle(torch.device("cpu"))  # made once, before a short or a long model peaks
        ledger.cut()
        yield packed, ledger, inputs


def _elsewhere(**_: Any) -> saved_tensors_hooks:
    """Replace torch's save_on_cpu. The device is a fake CPU here, so saved tensors are moved to the meta device, where
    they take no memory.
    """
    return saved_tensors_hooks(
        lambda tensor: torch.empty_like(tensor, device="meta"), lambda saved: torch.empty_like(saved, device="cpu")
    )


def _evenly(chosen: Tensor, num_here: int, group: Any) -> tuple[list[int], list[int], Tensor]:
    """Replace `experts.row_sizes` by equal token counts per expert, because fake tensors have no values."""
    sizes = [len(range(rank, chosen.numel(), group.size())) for rank in range(group.size())]
    return sizes, [sizes[0]] * group.size(), torch.arange(sizes[0] * group.size()) % num_here


def _own_rows(*layout: Any) -> Any:
    """Replace the function of torch, which computes the rows of a rank from the values of a tensor."""
    with unset_fake_temporarily():
        return compute_local_shape_and_global_offset(*layout)


def _forget_tables() -> None:
    """Clear cached tensors, so that fake and real tensors are not mixed."""
    for made in (
        attention._template, varlen._upper_triangle, recurrent._laid, recurrent._rounds, delta_rule._chunks,
    ):  # fmt: skip
        made.cache_clear()


@contextmanager
def _pretended_ranks(number: int) -> Iterator[None]:
    """Create a process group in which this process is rank 0 and whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


def layer_lists(packed: PackedModel) -> list[nn.ModuleList]:
    """Return the lists of repeated layers, of the decoder and of a tower."""
    names = set(packed.model._no_split_modules or ())
    lists = [each for each in packed.modules() if isinstance(each, nn.ModuleList) and len(each)]
    # FSDP renames the classes of layers.
    return [each for each in lists if {type(layer).__name__.removeprefix("FSDP") for layer in each} <= names]


# An operator, so that selective recomputation recognises its outputs.
@torch.library.custom_op(
    "rltrain::fusion_attention", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)"
)
def _attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Memory of npu_fusion_attention: its inputs, the output, and two values of 8 x fp32 per row."""
    rows = query.new_empty(2, *query.shape[:-1], 8, dtype=torch.float32)
    return query.new_empty(*query.shape[:-1], value.shape[-1]), rows


_attention.register_fake(_attention._init_fn)
_attention.register_autograd(
    lambda ctx, *gradients: tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


class _Kernels:
    """Replacement for torch_npu."""

    @staticmethod
    def npu_fusion_attention(query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> tuple[Tensor]:
        return (_attention(query, key, value)[0],)


# -- memory of passes --------------------------------------------------------------------------------------------------

Work = Callable[[Any, Ledger, PackedInputs], list[Owners]]


def peak_of(kind: type[Any], spec: ModelSpec, device: Device, num_ranks: int, batch: Batch, work: Work) -> Owners:
    """Return the bytes by owner at the peak of ``work`` on ``batch``.

    ``work`` returns the peaks of its stretches. In each stretch, memory is linear in the number of layers of a type. So
    for many layers it is extrapolated from a short and a longer model.
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
    """Return the indices of layers by type: with equal names and sizes of weights, and equal recomputation. The first
    layers of many families are dense. Windows of attention change no memory, so they are no type.
    """
    places: dict[object, list[int]] = {}
    for place, layer in enumerate(layers):
        sizes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
        places.setdefault((sizes, getattr(layer, "gradient_checkpointing", None)), []).append(place)
    return list(places.values())


def forward_only(with_entropy: bool) -> Work:
    """Return the work of a pass without gradients."""

    def work(packed: Any, ledger: Ledger, inputs: PackedInputs) -> list[Owners]:
        packed.eval()
        with torch.no_grad():
            found = packed(inputs, 1.0, with_entropy) if isinstance(packed, PolicyModel) else packed(inputs)
        del found
        reshard(packed)
        return [ledger.cut()]

    return work


def update(
    optim: OptimConfig, num_micro_batches: int, with_entropy: bool, entropy_learns: bool, once: bool = False,
    offload: bool = False,
) -> Work:  # fmt: skip
    """Return the work of an update: up to two micro-batches and a step of AdamW.

    The second micro-batch finds existing gradients. once: gradients are reduced only after the last micro-batch.
    offload: moments are on the host.
    """

    def work(packed: Any, ledger: Ledger, inputs: PackedInputs) -> list[Owners]:
        packed.train()
        trained = [each for each in packed.parameters() if each.requires_grad]
        optimizer = make_optimizer(packed, optim, replace(DEVICES["cpu"], fused_optimizer=False), offload=offload)
        for group in optimizer.param_groups:
            group["foreach"] = True  # as on accelerators
        with ledger.owner("optimizer"):
            for each in trained:
                moments(optimizer, each)
        stretches: list[Owners] = []
        first = next(iter(layer_lists(packed)[-1]))
        # At this layer, most layers are done and their activations are freed, so the peak is elsewhere.
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
