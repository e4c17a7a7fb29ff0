"""What is assumed of a device and a cluster, and not counted: shares of peaks, fixed times, links.

Fitted: `update_share`, `forward_share`, `step_ms`, `sync_gb_per_s` and `adv_us` are such that the phases of one
published table come out (verl, DeepSeek-R1-Distill-Qwen-7B on 64 devices that it does not name, taken for H100;
bench/results/simulate.md has that table and one that is not fitted). The others are what data sheets and rules of thumb
say. None is measured on an NPU. A run of one's own takes their place (``--from RUN``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rltrain.base.chips import Chip
from rltrain.base.errors import ConfigError, short

# In place of a chip's peaks, where none is known: only ratios to it are meant, which a run gives.
NOMINAL = Chip("CPU", 1e11, 1e10, 0)


@dataclass(frozen=True)
class Assumptions:
    """See the module. Times are of one device, shares of its peaks."""

    update_share: float = 0.365
    """Of the peak FLOP/s, in updates, recomputed activations counted. Fitted."""
    forward_share: float = 0.305
    """The same in passes without gradients and in computing prompts. Fitted."""
    bandwidth_share: float = 0.8
    """Of the memory bandwidth, in decoding. Assumed."""
    step_ms: float = 3.8
    """Of a decode step, whatever it computes: launches, sampling, the engine's own host work. Fitted."""
    all_reduce_us: float = 10.0
    """Of one all-reduce of a decode step where an engine spans devices: two a layer. Assumed."""
    sync_gb_per_s: float = 3.6
    """Weights that an engine's device takes over, all of them however many devices share the engine. Fitted."""
    node_gb_per_s: float = 150.0
    """Between the devices of a node, one way, each. Assumed."""
    network_gb_per_s: float = 20.0
    """Between nodes, one way, each device. Assumed."""
    host_gb_per_s: float = 20.0
    """Between a device and the host's memory. Assumed."""
    micro_batch_ms: float = 20.0
    """Of a micro-batch beside its FLOPs and its weights' arrival. Assumed."""
    sample_us: float = 100.0
    """Of a sample in a pass without gradients, to a rank and back; three times that in an update. Assumed."""
    optimizer_ms: float = 100.0
    """Of an optimizer step. Assumed."""
    adv_us: float = 230.0
    """Of advantages, a sample. Fitted."""
    reward_ms: float = 0.0
    """Of scoring behind the last answer, a sample. Given, not foretold: scorers are anybody's code."""
    silent_share: float = 0.0
    """Samples without a gradient that an update leaves out. Given: the data decides."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """By phase, measured seconds per foretold ones, of a run."""

    def with_words(self, words: str) -> Assumptions:
        """These with others in place of some: ``update_share=0.4,step_ms=5``. Raises ConfigError."""
        values: dict[str, Any] = {}
        names = [name for name, _ in self.told()]
        for word in filter(None, words.split(",")):
            name, _, text = word.partition("=")
            if name not in names:
                raise ConfigError(f"--assume {short(word)}: there is no {short(name)}. Known are {', '.join(names)}.")
            try:
                values[name] = float(text)
            except ValueError:
                raise ConfigError(f"--assume {short(word)}: {short(text)!r} is no number.") from None
            zero = name == "silent_share" or name.endswith(("_ms", "_us"))
            most = 1.0 if name.endswith("_share") else float("inf")
            if not (0 <= values[name] <= most if zero else 0 < values[name] <= most):
                least = "at least 0" if zero else "above 0"
                raise ConfigError(f"--assume {word}: it is {least}" + (" and at most 1." if most == 1 else "."))
        return replace(self, **values)

    def told(self) -> Iterator[tuple[str, float]]:
        """Names and values."""
        for each in fields(self):
            if each.name != "ratios":
                yield each.name, getattr(self, each.name)


# Without a chip a run's ratios decide. These say only how answers, tokens, samples and micro-batches weigh against each
# other: fitted to five runs of small models on two busy cores.
ON_CPU = Assumptions(
    update_share=1, forward_share=1, bandwidth_share=1, step_ms=8, all_reduce_us=0, sync_gb_per_s=0.3, node_gb_per_s=1,
    network_gb_per_s=1, micro_batch_ms=20, sample_us=700, optimizer_ms=20, adv_us=15,
)  # fmt: skip
