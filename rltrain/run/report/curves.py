"""Charts of report.html, from the metrics and details of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rltrain.config.passes import device_phases
from rltrain.run.report.charts import Line, Section, heat_chart, line_chart, spans_chart, stacked_bars
from rltrain.run.report.details import BINS_PER_OCTAVE, StepDetails
from rltrain.run.report.table import PHASES

# 95 % of the means over prompts lie within this many standard errors.
_SIGMAS = 1.96
_CORE = re.compile(r"val-core/(.+)/([^/]+)/((?:mean|maj)@\d+(?:/mean)?)")
_MOST_BARS = 400
_OWNER = re.compile(r"perf/memory_gb/(\w+)/(\w+)")
_OWNERS = ("weights", "optimizer", "work", "others")
_ON_DEVICE = ("start", *device_phases())
# Title, unit, and metrics with their labels.
Chart = tuple[str, str, Mapping[str, str]]
_UPDATE: list[Chart] = [
    ("KL from the reference", "per token", {"actor/kl_loss": "in the loss",
                                            "actor/reward_kl_penalty": "in the reward"}),
    ("KL of the update", "per token", {"actor/ppo_kl": "old policy to new"}),
    ("Entropy", "nats per token", {"actor/entropy": "entropy"}),
    ("Clipped tokens", "share", {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "by the dual clip"}),
    ("Gradient norm before clipping", "", {"actor/grad_norm": "actor", "critic/grad_norm": "critic"}),
    ("Learning rate", "", {"actor/lr": "actor", "critic/lr": "critic"}),
    ("Loss", "", {"actor/pg_loss": "policy loss", "critic/vf_loss": "value loss", "distillation/loss": "distillation"}),
    ("Groups", "share", {"reward/groups_all_right": "all right", "reward/groups_mixed": "mixed",
                         "reward/groups_all_wrong": "all wrong"}),
    ("Trainer against engine", "mean |difference of log-probs|", {"rollout/log_prob_gap/mean": "gap"}),
    ("Explained variance of the critic", "", {"critic/vf_explained_var": "explained"}),
    ("Load of experts", "(busiest - mean) / mean", {"moe/max_vio/mean": "mean of layers", "moe/max_vio/max": "worst"}),
    ("Turns", "", {"num_turns/mean": "mean", "num_turns/max": "most"}),
]  # fmt: skip
_SPEED: list[Chart] = [
    ("Throughput", "tokens/s/device", {"perf/throughput": "whole step", "perf/gen_throughput": "generation"}),
    ("Share of the device's peak", "", {
        "perf/mfu/actor": "update, of FLOP/s", "perf/mfu/actor_infer": "old_log_prob, of FLOP/s",
        "perf/mfu/ref": "ref, of FLOP/s", "perf/mfu/critic": "critic, of FLOP/s",
        "perf/mbu/rollout": "decoding, of memory bandwidth"}),
    ("FLOP/s of passes", "10^12 per device", {
        "perf/tflops/actor": "update", "perf/tflops/actor_infer": "old_log_prob", "perf/tflops/ref": "ref",
        "perf/tflops/critic": "critic"}),
    ("Replicas without work", "share of generation", {"perf/rollout_idle_share": "idle",
                                                      "perf/rollout_wait_share": "waiting for tools"}),
]  # fmt: skip
_MEMORY: list[Chart] = [
    ("A device, largest rank", "GiB", {"perf/max_memory_allocated_gb": "allocated",
                                       "perf/max_memory_reserved_gb": "reserved"}),
    ("The machine", "GiB", {"perf/cpu_memory_used_gb": "used on the fullest node",
                            "perf/cpu_memory_peak_gb": "peak of a worker"}),
    ("The largest process of a kind", "GiB", {
        "drift/driver_gb": "driver", "drift/worker_gb": "worker", "drift/engine_gb": "engine",
        "drift/scorer_gb": "scorer", "drift/ray_gb": "Ray", "drift/object_store_gb": "object store"}),
]  # fmt: skip
_TROUBLE: list[Chart] = [
    ("Answers that could not be scored", "share", {"reward/error_rate": "errors", "reward/timeout_rate": "timeouts"}),
    ("Tools", "calls", {"agent/tool_calls": "calls", "agent/tool_errors": "failed", "agent/tool_timeouts": "too late"}),
    ("Steps not made", "optimizer steps", {"actor/steps_skipped": "not finite", "actor/steps_overflowed": "overflowed",
                                           "actor/steps_empty": "empty"}),
]  # fmt: skip


def learning(frame: pd.DataFrame) -> Section:
    """Return the section on the reward of training and validation."""
    section = Section("Learning", "Bands are 95 % intervals of a mean over prompts.")
    score = _lines(frame, {"critic/score/mean": "score"}, {"critic/score/mean": "critic/score/sem"})
    section.charts += [line_chart("Training reward", score)] if score else []
    names = {name: name.replace("/", " ", 1) for name in frame.columns if re.match(r"(train|val)/loss", name)}
    section.charts += [line_chart("Loss per token", _lines(frame, names))] if names else []
    core: dict[str, dict[str, str]] = {}
    for name in frame.columns:
        if match := _CORE.fullmatch(name):
            source, variable, kind = match.groups()
            core.setdefault(f"Validation: {variable}", {})[name] = f"{source} {kind.partition('/')[0]}"
    for title, names in core.items():
        # A majority vote has no standard error.
        errors = {name: re.sub(r"val-core/(.*)/mean@", r"val-aux/\1/sem@", name) for name in names if "/mean@" in name}
        section.charts.append(line_chart(title, _lines(frame, names, errors)))
    sources = {name: name.split("/", 1)[1].removesuffix("/score/mean") for name in frame.columns
               if name.startswith("train/") and name.endswith("/score/mean")}  # fmt: skip
    section.charts += [line_chart("Training reward by source", _lines(frame, sources))] if sources else []
    return section


def lengths(frame: pd.DataFrame, details: Mapping[int, StepDetails]) -> Section:
    """Return the section on response lengths."""
    section = Section("Lengths of answers")
    if found := {step: one.lengths for step, one in details.items() if one.lengths}:
        section.charts.append(_length_heat(found))
    percentiles = {f"rollout/response_length/p{q}": f"p{q}" for q in (50, 90, 99)}
    more = [("Length", "tokens", percentiles | {"response_length/max": "longest"}),
            ("Cut off", "share of answers", {"response_length/clip_ratio": "cut off"})]  # fmt: skip
    section.charts += _charts(frame, more)
    return section


def _length_heat(found: Mapping[int, Mapping[int, int]]) -> Any:
    from bokeh.models import FixedTicker

    steps, top = sorted(found), max(max(bins) for bins in found.values())
    counts = np.zeros((top + 1, steps[-1] - steps[0] + 1))
    for step, bins in found.items():
        for place, number in bins.items():
            counts[place, step - steps[0]] = number
    chart = heat_chart("How many answers were so long", counts, (steps[0] - 0.5, steps[-1] + 0.5), (0, top + 1))
    octaves = range(0, top // BINS_PER_OCTAVE + 1, 1 + top // (8 * BINS_PER_OCTAVE))
    chart.yaxis.ticker = FixedTicker(ticks=[BINS_PER_OCTAVE * octave for octave in octaves])
    chart.yaxis.major_label_overrides = {BINS_PER_OCTAVE * octave: f"{2**octave:,}" for octave in octaves}
    chart.yaxis.axis_label = "tokens"
    return chart


def update(frame: pd.DataFrame) -> Section:
    """Return the section on the update."""
    return Section("The update", charts=_charts(frame, _UPDATE))


def time(frame: pd.DataFrame, details: Mapping[int, StepDetails]) -> Section:
    """Return the section on the time of steps."""
    section = Section("Time")
    whole = "timing_s/step"
    steps = frame[frame[whole].notna()] if whole in frame else frame[:0]
    if len(steps) > _MOST_BARS:
        section.note = f"Bars are means of {-(-len(steps) // _MOST_BARS)} steps."
        steps = steps.groupby(np.arange(len(steps)) * _MOST_BARS // len(steps)).mean(numeric_only=True)
    if len(steps):
        # `gen` includes generation and weight sync, `reward` includes the judge.
        names = [name for name in (*PHASES, "other", "testing", "save_checkpoint")
                 if name not in ("generate_sequences", "reshard", "judge", "step")]  # fmt: skip
        parts = {name: steps[f"timing_s/{name}"].fillna(0) for name in names if f"timing_s/{name}" in steps}
        first, last = steps["step"].iloc[[0, -1]]
        width = 0.9 * (float(last - first) / (len(steps) - 1) if len(steps) > 1 else 1.0)
        section.charts.append(stacked_bars("Phases of each step", steps["step"], parts, "seconds", width))
    # A step that is being saved has details but no metrics yet.
    known = set(frame["step"].astype(int))
    timed = {step: one for step, one in details.items() if one.spans and step in known}
    if timed:
        last = max(timed)
        section.charts.append(_timeline(last, timed[last], frame))
        slowest = max(timed, key=lambda step: max(span.end for span in timed[step].spans))
        section.charts += [_timeline(slowest, timed[slowest], frame, ", the slowest")] if slowest != last else []
    section.charts += _charts(frame, _SPEED)
    return section


def _timeline(step: int, one: StepDetails, frame: pd.DataFrame, said: str = "") -> Any:
    """Return the phases of the driver, and below them the replicas. A pale part is an idle replica."""
    rows: dict[str, list[tuple[str, float, float]]] = {"driver": [
        (span.phase, span.begin, span.end) for span in one.spans if span.phase != "step"
    ]}  # fmt: skip
    generations = [span for span in one.spans if span.phase == "gen"]
    line = frame[frame["step"] == step]
    # With several rounds (dynamic sampling), end times are relative to an unknown round.
    if len(generations) == 1 and one.replicas:
        reshard = float(line["timing_s/reshard"].fillna(0).iloc[0]) if "timing_s/reshard" in line else 0.0
        begin, end = generations[-1].begin + reshard, generations[-1].end
        for place, ends in enumerate(one.replicas):
            half, most, last = (min(begin + seconds, end) for seconds in ends) if ends else (begin,) * 3
            rows[f"replica {place}"] = [("weights come", generations[-1].begin, begin), ("first half", begin, half),
                                        ("to 90 %", half, most), ("the last answers", most, last),
                                        ("idle", last, end)]  # fmt: skip
    return spans_chart(f"Step {step}{said}", rows)


def memory(frame: pd.DataFrame) -> Section:
    """Return the section on memory."""
    section = Section("Memory")
    last = frame.ffill().tail(1).to_dict("records")
    found = [(match[1], match[2], value) for name, value in (last[0] if last else {}).items()
             if (match := _OWNER.fullmatch(name)) and value > 0]  # fmt: skip
    if found:
        phases = sorted({phase for phase, *_ in found}, key=_ON_DEVICE.index)
        size = {(phase, owner): value for phase, owner, value in found}
        parts = {owner: [size.get((phase, owner), 0.0) for phase in phases] for owner in _OWNERS}
        section.note = (
            "By phase: what was there at its peak, each the largest of all ranks and steps. Work are gradients, "
            "activations, gathered weights and an embedded engine; others are an engine's own process and the driver."
        )
        section.charts.append(stacked_bars("A device by phase", phases, parts, "GiB", 0.7, x_range=phases))
    section.charts += _charts(frame, _MEMORY)
    return section


def trouble(frame: pd.DataFrame) -> Section:
    """Errors and timeouts."""
    # Metrics that are always 0 are not shown.
    seen = frame[[name for name in frame.columns if name == "step" or (frame[name].fillna(0) != 0).any()]]
    return Section("Errors and timeouts", charts=_charts(seen, _TROUBLE))


def _charts(frame: pd.DataFrame, charts: Iterable[Chart]) -> list[Any]:
    found = ((title, unit, _lines(frame, names)) for title, unit, names in charts)
    return [line_chart(title, lines, unit) for title, unit, lines in found if lines]


def _lines(frame: pd.DataFrame, names: Mapping[str, str], errors: Mapping[str, str] = {}) -> list[Line]:
    """Return a line for each metric that the run has. errors: metric -> metric of its standard error."""
    lines = []
    for name, label in names.items():
        if name not in frame or frame[name].notna().sum() == 0:
            continue
        rows = frame[frame[name].notna()]
        band: tuple[Any, Any] = (None, None)
        if errors.get(name) in frame:
            wide = _SIGMAS * rows[errors[name]].fillna(0)
            band = (rows[name] - wide, rows[name] + wide)
        lines.append(Line(label, rows["step"], rows[name], *band))
    return lines


def sections(frame: pd.DataFrame, details: Mapping[int, StepDetails]) -> Sequence[Section]:
    """Return all sections, in the order of the page."""
    return [learning(frame), lengths(frame, details), update(frame), time(frame, details), memory(frame),
            trouble(frame)]  # fmt: skip
