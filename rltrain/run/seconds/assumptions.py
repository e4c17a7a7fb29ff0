"""What is assumed of a device and a cluster, and not counted: shares of peaks, fixed times, links.

Fitted: `update_share`, `forward_share`, `step_ms`, `sync_gb_per_s` and `adv_us` are such that the phases of one
published table come out (verl, DeepSeek-R1-Distill-Qwen-7B on 64 devices that it does not name, taken for H100;
bench/results/simulate.md has that table and one that is not fitted). The others are what data sheets and rules of thumb
say. None is measured on an NPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from rltrain.config.schema.fields import key


@dataclass(frozen=True)
class Assumptions:
    """See the module. Times are of one device, shares of its peaks."""

    update_share: float = key(0.365, over=0, most=1)
    """Of the peak FLOP/s, in updates, recomputed activations counted. Fitted."""
    forward_share: float = key(0.305, over=0, most=1)
    """The same in passes without gradients and in computing prompts. Fitted."""
    bandwidth_share: float = key(0.8, over=0, most=1)
    """Of the memory bandwidth, in decoding. Assumed."""
    step_ms: float = key(3.8, least=0)
    """Of a decode step, whatever it computes: launches, sampling, the engine's own host work. Fitted."""
    all_reduce_us: float = key(10.0, least=0)
    """Of one all-reduce of a decode step where an engine spans devices: two a layer. Assumed."""
    sync_gb_per_s: float = key(3.6, over=0)
    """Weights that an engine's device takes over, all of them however many devices share the engine. Fitted."""
    node_gb_per_s: float = key(150.0, over=0)
    """Between the devices of a node, one way, each. Assumed."""
    network_gb_per_s: float = key(20.0, over=0)
    """Between nodes, one way, each device. Assumed."""
    host_gb_per_s: float = key(20.0, over=0)
    """Between a device and the host's memory. Assumed."""
    micro_batch_ms: float = key(20.0, least=0)
    """Of a micro-batch beside its FLOPs and its weights' arrival. Assumed."""
    sample_us: float = key(100.0, least=0)
    """Of a sample in a pass without gradients, to a rank and back; three times that in an update. Assumed."""
    optimizer_ms: float = key(100.0, least=0)
    """Of an optimizer step. Assumed."""
    adv_us: float = key(230.0, least=0)
    """Of advantages, a sample. Fitted."""
    reward_ms: float = key(0.0, least=0)
    """Of scoring behind the last answer, a sample. Given, not foretold: scorers are anybody's code."""
    silent_share: float = key(0.0, least=0, most=1)
    """Samples without a gradient that an update leaves out. Given: the data decides."""
