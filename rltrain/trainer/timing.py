"""Seconds of a step's phases, as the driver sees them, and how much they have used of what the devices can do: FLOP/s
of passes, memory bandwidth of decoding.

Passes are counted twice. What is computed: a prompt that answers share counts once, as do its images. What others
count: every sample brings its prompt along, whether that was computed or not, so that shared prompts show as a higher
share. Neither counts recomputed activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from rltrain.config.passes import PASSES
from rltrain.trainer.balance import LayoutCost

Metrics = dict[str, float]


class Span(NamedTuple):
    """A phase of a step: seconds from the step's start to where it begins and ends."""

    phase: str
    begin: float
    end: float


class StepTimer:
    """``with timer("gen"): ...`` adds the block's seconds to ``timing_s/gen``. begins(name) is called at its start.

    spans: every block that has ended, those within others too.
    """

    def __init__(self, begins: Callable[[str], None] = lambda name: None) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self._created = time.perf_counter()
        self._begins = begins
        self._open: list[str] = []
        self._claimed = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._begins(name)
        self._open.append(name)
        started = time.perf_counter()
        try:
            yield
        # Also after an error, and added up: dynamic sampling has several rounds of one phase.
        finally:
            ended = time.perf_counter()
            seconds = ended - started
            self.spans.append(Span(name, started - self._created, ended - self._created))
            self._open.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self._claimed += seconds if self._open == ["step"] else 0.0

    def metrics(self) -> dict[str, float]:
        """``timing_s/<name>``, with ``timing_s/other`` = the part of the step that no phase claims."""
        timing = {f"timing_s/{name}": value for name, value in self.seconds.items()}
        if "step" in self.seconds:
            timing["timing_s/other"] = self.seconds["step"] - self._claimed
        return timing


def flops_metrics(
    costs: Mapping[str, LayoutCost], timing: Metrics, sizes: Mapping[str, float], num_devices: int
) -> Metrics:
    """``perf/tflops/*``: 10^12 model FLOP/s of a device; ``perf/mfu/*``: their share of its bf16 peak, where it is
    known, and with ``_prompts_repeated`` the same with every prompt counted for each of its answers.

    costs: by phase, in tokens, their attention and images included. A token takes 2 FLOPs per weight in a forward and 6
    in an update, without the input embedding (Narayanan et al. 2021, appendix, halved for causality). Costs are in
    tokens of the actor; another role's model has its own weights and attention.
    """
    metrics: Metrics = {}
    for phase, cost in costs.items():
        name, owner = PASSES[phase].rate, PASSES[phase].role + "_"
        if name is None:
            continue
        # The reference may be the actor without its adapters.
        owner = owner if f"{owner}matmul_parameters" in sizes else ""
        weights, width = sizes[f"{owner}matmul_parameters"], sizes.get(f"{owner}attention_width", 1)
        # Attention and images, as forward FLOPs per unit of cost that is no token.
        unit = 2 * sizes["matmul_parameters"] * width / max(sizes.get("attention_width", 1), 1)
        for suffix, total, tokens in (
            ("", cost.cost, cost.tokens),
            ("_prompts_repeated", cost.repeated_cost, cost.repeated_tokens),
        ):
            flops = 2 * weights * tokens + unit * (total - tokens)
            if PASSES[phase].updates:
                # Gradients of activations and weights take as much again each; those of frozen weights are left out.
                flops = 3 * flops - 2 * (weights - min(sizes[f"{owner}trained_parameters"], weights)) * tokens
            rate = float(flops / (timing[f"timing_s/{phase}"] * num_devices))
            metrics |= {} if suffix else {f"perf/tflops/{name}": rate / 1e12}
            if peak := sizes.get("peak_flops"):
                metrics[f"perf/mfu/{name}{suffix}"] = rate / peak
    return metrics


def decode_metrics(metrics: Metrics, sizes: Mapping[str, float], num_devices: int) -> Metrics:
    """``perf/mbu/rollout``: bytes that decoding must read / (generate_sequences x devices x bandwidth of a device).

    They are the weights once per decode step of a replica, and the keys and values of the context once per token: a
    lower bound, so the share is one too. Not where the bandwidth is unknown.
    """
    if not (bandwidth := sizes.get("peak_bandwidth")):
        return {}
    read = metrics["perf/decode_steps"] * sizes["decode_bytes"]
    read += metrics["perf/decode_context_tokens"] * sizes["cache_bytes_per_token"]
    return {"perf/mbu/rollout": read / (metrics["timing_s/generate_sequences"] * num_devices * bandwidth)}
