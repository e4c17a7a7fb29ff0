"""Charts of report.html, from the metrics of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rltrain.config.passes import PASSES
from rltrain.run.report.charts import Line, Section, line_chart, stacked_bars
from rltrain.run.report.table import PHASES

# 95 % of the means over prompts lie within this many standard errors.
_SIGMAS = 1.96
_CORE = re.compile(r"val-core/(.+)/([^/]+)/((?:mean|maj)@\d+(?:/mean)?)")
_MOST_BARS = 400
# Phases that are part of another phase have no bar: `gen` includes generation and weight sync, `reward` the judge.
_BARS = [name for name in (*PHASES, "other", "testing", "save_checkpoint")
         if name not in ("generate_sequences", "reshard", "judge", "step")]  # fmt: skip
# Title, unit, and metrics with their labels.
Chart = tuple[str, str, Mapping[str, str]]
_LENGTHS: list[Chart] = [
    ("Length", "tokens", {f"rollout/response_length/p{q}": f"p{q}" for q in (50, 90, 99)} | {
        "response_length/max": "longest"}),
    ("Cut off", "share of answers", {"response_length/clip_ratio": "cut off"}),
]  # fmt: skip
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
    ("Waiting for rows, slowest rank", "seconds", {f"timing_s/fetch/{name}": name for name in PASSES}),
    ("Samples sent between nodes", "bytes", {f"perf/node_bytes/{name}": name for name in (*PASSES, "other")}),
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
_ERRORS: list[Chart] = [
    ("Answers that could not be scored", "share", {"reward/error_rate": "errors", "reward/timeout_rate": "timeouts"}),
    ("Tools", "calls", {"agent/tool_calls": "calls", "agent/tool_errors": "failed", "agent/tool_timeouts": "too late"}),
    ("Steps not made", "optimizer steps", {"actor/steps_skipped": "not finite", "actor/steps_overflowed": "overflowed",
                                           "actor/steps_empty": "empty"}),
]  # fmt: skip


def sections(frame: pd.DataFrame) -> list[Section]:
    """Return the sections with charts, in the order of the page. frame: one row per step, one column per metric."""
    # Errors that never occurred are not shown.
    occurred = frame[[name for name in frame if name == "step" or (frame[name].fillna(0) != 0).any()]]
    return [
        _learning(frame),
        Section("Lengths of answers", charts=_charts(frame, _LENGTHS)),
        Section("The update", charts=_charts(frame, _UPDATE)),
        _time(frame),
        Section("Memory", charts=_charts(frame, _MEMORY)),
        Section("Errors and timeouts", charts=_charts(occurred, _ERRORS)),
    ]


def _learning(frame: pd.DataFrame) -> Section:
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


def _time(frame: pd.DataFrame) -> Section:
    """Return the section on the time of steps."""
    section = Section("Time")
    steps = frame[frame["timing_s/step"].notna()] if "timing_s/step" in frame else frame[:0]
    if len(steps) > _MOST_BARS:
        section.note = f"Bars are means of {-(-len(steps) // _MOST_BARS)} steps."
        steps = steps.groupby(np.arange(len(steps)) * _MOST_BARS // len(steps)).mean(numeric_only=True)
    if len(steps):
        parts = {name: steps[f"timing_s/{name}"].fillna(0) for name in _BARS if f"timing_s/{name}" in steps}
        first, last = steps["step"].iloc[[0, -1]]
        width = 0.9 * (float(last - first) / (len(steps) - 1) if len(steps) > 1 else 1.0)
        section.charts.append(stacked_bars("Phases of each step", steps["step"], parts, "seconds", width))
    section.charts += _charts(frame, _SPEED)
    return section


def _charts(frame: pd.DataFrame, charts: Sequence[Chart]) -> list[Any]:
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
