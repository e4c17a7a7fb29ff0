"""Seconds of a step's phases on the driver, and device utilisation: FLOP/s of passes, memory bandwidth of decoding.

FLOPs of passes are counted twice. The first count is the computed work: a shared prompt and its images count once. The
second count repeats the prompt for every sample, as other trainers do. Neither includes recomputed activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rltrain.config.passes import PASSES
from rltrain.trainer.batching.balance import LayoutCost

Metrics = dict[str, float]


class StepTimer:
    """Timer of phases: ``with timer("gen"): ...`` adds the block's seconds to ``timing_s/gen``.

    begins(name): called when a block starts.
    """

    def __init__(self, begins: Callable[[str], None] = lambda name: None) -> None:
        self.seconds: dict[str, float] = {}
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
        # Seconds are recorded even after an error. They are summed, because dynamic sampling repeats phases.
        finally:
            seconds = time.perf_counter() - started
            self._open.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self._claimed += seconds if self._open == ["step"] else 0.0

    def metrics(self) -> dict[str, float]:
        """Return ``timing_s/<name>``; ``timing_s/other`` is the part of the step outside all phases."""
        timing = {f"timing_s/{name}": value for name, value in self.seconds.items()}
        if "step" in self.seconds:
            timing["timing_s/other"] = self.seconds["step"] - self._claimed
        return timing


def flops_metrics(
    costs: Mapping[str, LayoutCost], timing: Metrics, sizes: Mapping[str, float], num_devices: int
) -> Metrics:
    """Return ``perf/tflops/*`` (10^12 model FLOP/s per device) and ``perf/mfu/*`` (share of its bf16 peak, if known).

    ``_prompts_repeated``: the prompt counts for each of its responses. costs: costs by phase in actor tokens, including
    attention and images. A token takes 2 FLOPs per weight in a forward pass and 6 in an update, without the input
    embedding (Narayanan et al. 2021, appendix, halved for causality). Other roles use their model's weights and
    attention.
    """
    metrics: Metrics = {}
    for phase, cost in costs.items():
        name, owner = PASSES[phase].rate, PASSES[phase].role + "_"
        if name is None:
            continue
        # If the reference is the actor without its adapters, it has no sizes under its name, and the actor's apply.
        owner = owner if f"{owner}matmul_parameters" in sizes else ""
        weights, width = sizes[f"{owner}matmul_parameters"], sizes.get(f"{owner}attention_width", 1)
        # Forward FLOPs per unit of the cost of attention and images.
        unit = 2 * sizes["matmul_parameters"] * width / max(sizes.get("attention_width", 1), 1)
        for suffix, total, tokens in (
            ("", cost.cost, cost.tokens),
            ("_prompts_repeated", cost.repeated_cost, cost.repeated_tokens),
        ):
            flops = 2 * weights * tokens + unit * (total - tokens)
            if PASSES[phase].updates:
                # Gradients of activations and of weights each cost as much again; frozen weights have only the former.
                flops = 3 * flops - 2 * (weights - min(sizes[f"{owner}trained_parameters"], weights)) * tokens
            rate = float(flops / (timing[f"timing_s/{phase}"] * num_devices))
            metrics |= {} if suffix else {f"perf/tflops/{name}": rate / 1e12}
            if peak := sizes.get("peak_flops"):
                metrics[f"perf/mfu/{name}{suffix}"] = rate / peak
    return metrics


def decode_metrics(metrics: Metrics, sizes: Mapping[str, float], num_devices: int) -> Metrics:
    """Return ``perf/mbu/rollout``: bytes that decoding must read / (generate_sequences x devices x device bandwidth).

    These bytes are the weights once per decode step of a replica, and keys and values of the context once per token.
    That is a lower bound, so the metric is a lower bound too. Empty if the bandwidth is unknown.
    """
    if not (bandwidth := sizes.get("peak_bandwidth")):
        return {}
    read = metrics["perf/decode_steps"] * sizes["decode_bytes"]
    read += metrics["perf/decode_context_tokens"] * sizes["cache_bytes_per_token"]
    return {"perf/mbu/rollout": read / (metrics["timing_s/generate_sequences"] * num_devices * bandwidth)}
