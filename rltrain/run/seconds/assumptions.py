"""Assumptions about a device and a cluster that are not computed: shares of peaks, fixed times, links.

`update_share`, `forward_share`, `step_ms`, `sync_gb_per_s` and `adv_us` are fitted to the phases of one published table
(verl, DeepSeek-R1-Distill-Qwen-7B on 64 unnamed devices, assumed to be H100; bench/results/simulate.md has this table
and one that was not used for fitting). The others come from data sheets and rules of thumb. None is measured on an NPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from rltrain.config.schema.fields import key


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of an estimate (see the module's docstring). Times are for one device; shares are of its peaks."""

    update_share: float = key(0.365, over=0, most=1)
    """Share of the peak FLOP/s in updates, counting recomputed activations. Fitted."""
    forward_share: float = key(0.305, over=0, most=1)
    """Share of the peak FLOP/s in passes without gradients and in prefill. Fitted."""
    bandwidth_share: float = key(0.8, over=0, most=1)
    """Share of the memory bandwidth in decoding. Assumed."""
    step_ms: float = key(3.8, least=0)
    """Fixed time of a decode step: launches, sampling, the engine's host work. Fitted."""
    all_reduce_us: float = key(10.0, least=0)
    """Time of one all-reduce of a decode step if an engine spans devices (two per layer). Assumed."""
    sync_gb_per_s: float = key(3.6, over=0)
    """Rate at which an engine's device receives weights. Every sync counts as one of all weights. Fitted."""
    node_gb_per_s: float = key(150.0, over=0)
    """Rate between the devices of a node, one way, per device. Assumed."""
    network_gb_per_s: float = key(20.0, over=0)
    """Rate between nodes, one way, per device. Assumed."""
    host_gb_per_s: float = key(20.0, over=0)
    """Rate between a device and host memory. Assumed."""
    micro_batch_ms: float = key(20.0, least=0)
    """Fixed time of a micro-batch, in addition to its FLOPs and to gathering weights. Assumed."""
    sample_us: float = key(100.0, least=0)
    """Transfer time of a sample to a rank and back in a pass without gradients; three times that in an update. Assumed.
    """
    optimizer_ms: float = key(100.0, least=0)
    """Time of an optimizer step. Assumed."""
    adv_us: float = key(230.0, least=0)
    """Time per sample to compute advantages. Fitted."""
    reward_ms: float = key(0.0, least=0)
    """Scoring time per sample after the last response. An input, because scorers are user code."""
    silent_share: float = key(0.0, least=0, most=1)
    """Share of samples without a gradient, which an update skips. An input, because it depends on the data."""
