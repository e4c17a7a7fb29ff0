"""report.html: a run as one page that opens offline in any browser.

A table of means would hide tails, collapses and malformed responses. The page is one file made from the run folder, at
the end of a run or at any time. Parts without data are omitted. It draws no conclusions; alarms do that during the run.
"""

from __future__ import annotations

import base64
import io
import logging
import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from yaml import YAMLError, safe_load

from rltrain.common.errors import RltrainError
from rltrain.common.images import file_bytes
from rltrain.common.storage import lines_of, patiently, read_json, run_folder, write_text
from rltrain.config.schema.keys import all_keys, followed
from rltrain.config.verl.keys import leaves_of
from rltrain.data.stored_images import ImageColumn, image_entries
from rltrain.run.report.charts import Line, Section, Table, line_chart, page, stacked_bars
from rltrain.run.report.samples import (
    different_prompts_first,
    is_right,
    numbers_of,
    one_line,
    read_samples,
    sample_steps,
    shorten,
    text_of,
    texts_of,
)
from rltrain.run.report.table import (
    PHASES,
    by_step,
    learning_summary,
    mostly_truncated,
    nothing_earned,
    read_metrics,
    summary,
)

log = logging.getLogger(__name__)
PAGE = "report.html"
_MOST_ANSWERS, _MAX_IMAGES, _MOST_CHARS, _MOST_WARNINGS = 6, 2, 6_000, 40
_PICTURE_PIXELS = 320
_ORIGIN = re.compile(r"(['\"])(?P<path>.*)\1 row (?P<row>\d+)")
_WARNING = re.compile(r"\S+ \S+ (?:warning|error): ")


def write_page(run: Path, file: Path | None = None) -> Path:
    """Write the page of ``run`` to ``file`` (None: report.html in its folder) atomically. Return the path.

    Raises DataError if ``run`` is not a run folder, DiskError or StorageError if a file cannot be read or written.
    """
    return write_text(file or run / PAGE, page_of(run))


def page_of(run: Path) -> str:
    """Return the page as HTML. Raises as `write_page`."""
    lines = read_metrics(run_folder(run))
    frame = by_step(lines).reset_index() if lines else pd.DataFrame({"step": []})
    settings, plan, environment = _settings(run), read_json(run / "plan.json") or {}, read_json(run / "env.json") or {}
    parts = [*sections(frame), _phases(lines), _answers(run, settings), _warnings(run), _differences(settings)]
    summaries = [learning_summary(lines).replace("\n", "; "), nothing_earned(run, lines), mostly_truncated(run, lines)]
    subtitle = ". ".join(filter(None, summaries))
    return page(run.resolve().name, subtitle, _facts(frame, settings, plan, environment), parts)


def _facts(
    frame: pd.DataFrame, settings: Mapping[str, Any], plan: Mapping[str, Any], environment: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the facts at the top of the page."""
    made = frame[frame["timing_s/step"].notna()] if "timing_s/step" in frame else frame[:0]
    total = plan.get("total_steps")
    seconds = made["timing_s/wall"].fillna(made["timing_s/step"]).sum() if "timing_s/wall" in made else 0.0
    devices = f"{plan.get('num_nodes')} x {plan.get('devices_per_node')}" if plan else ""
    kinds = list(dict.fromkeys(map(str, environment.get("devices") or [])))
    facts = [
        ("steps", f"{int(made['step'].max()) if len(made) else 0}" + (f" of {total}" if total else "")),
        ("hours of steps", f"{seconds / 3600:.2f}" if seconds else ""),
        ("model", str(settings.get("actor_rollout_ref.model.path", "")).rstrip("/").rpartition("/")[2]),
        ("algorithm", str(settings.get("algorithm.adv_estimator", ""))),
        ("engine", str(settings.get("actor_rollout_ref.rollout.name", ""))),
        ("devices", f"{devices} {kinds[0] if kinds else settings.get('trainer.device', '')}".strip()),
        ("prompts x answers", f"{plan.get('prompts_per_step')} x {plan.get('answers_per_prompt')}" if plan else ""),
        ("rltrain", f"{environment.get('rltrain', '')} {environment.get('git') or ''}".strip()),
    ]
    return [(name, value) for name, value in facts if value]


def _phases(lines: list[dict[str, Any]]) -> Section:
    title, rows = summary(lines)
    table = Table(["metric", "mean", "share of the step", "largest", "in step", "unit"], [
        [label, f"{mean:,.4g}", "" if share is None else f"{share:.0%}", f"{most:,.4g}", str(step), unit]
        for label, unit, mean, most, step, share in rows
    ])  # fmt: skip
    return Section("Seconds of a step", title, tables=[table])


def _settings(run: Path) -> dict[str, Any]:
    """Return the settings by dotted key; empty if the run has no readable config.yaml."""
    file = run / "config.yaml"
    try:
        return dict(leaves_of(safe_load(patiently(file, partial(file.read_text, "utf-8")))))
    except (FileNotFoundError, YAMLError, TypeError, AttributeError):
        return {}


def _differences(settings: Mapping[str, Any]) -> Section:
    """Return the section of the settings that differ from the defaults."""
    rows = []
    for name, key in all_keys().items():
        if name not in settings:
            continue
        other = followed(name)
        default = settings.get(other) if other else key.default
        # Defaults that depend on the machine cannot be shown.
        if settings[name] != default and not (isinstance(default, str) and default.startswith("${")):
            rows.append([name, text_of(settings[name]), f"as {other}" if other else text_of(default)])
    return Section("Settings that are not the defaults", tables=[Table(["key", "value", "default"], rows)])


def _warnings(run: Path) -> Section:
    """Return the section of the warnings in train.log, the newest last."""
    found = [(line[:19], line.split(" ", 2)[2]) for line in lines_of(run / "train.log") if _WARNING.match(line)]
    first = {message: time for time, message in reversed(found)}
    counts = list(Counter(message for _, message in found).items())[-_MOST_WARNINGS:]
    rows = [[first[message], shorten(message, 400), str(times)] for message, times in counts]
    return Section("Warnings", "From train.log, the newest last.", tables=[Table(["first", "message", "times"], rows)])


def _answers(run: Path, settings: Mapping[str, Any]) -> Section:
    """Return some responses of the newest validation and the newest step, wrong and right ones if both exist."""
    section = Section("Answers", "A few of the saved responses; rltrain view RUN shows all.")
    for split, name in (("val", "validation"), ("train", "training")):
        try:
            step = max(sample_steps(run, split))
            rows = _chosen(read_samples(run, step, split)).to_dict("records")
        except (RltrainError, OSError, ValueError):
            continue
        for row in rows:
            answer = {"right": is_right(row), "mark": f"{float(row['score']):.3g}"}
            answer["line"] = f"{name} of step {step}: {one_line(row, 140)}"
            answer["texts"] = [*texts_of(row, _MOST_CHARS), ("numbers", numbers_of(row))]
            answer["images"] = _images(row, str(settings.get("data.image_key", "images")))
            section.answers.append(answer)
    return section


def _chosen(frame: pd.DataFrame) -> pd.DataFrame:
    """Return some rows, half wrong and half right if there are enough, each of a different prompt if possible."""
    right, half = frame.apply(is_right, axis=1), _MOST_ANSWERS // 2
    bad, good = different_prompts_first(frame[~right]), different_prompts_first(frame[right])
    return pd.concat([bad[: max(half, _MOST_ANSWERS - len(good))], good[: max(half, _MOST_ANSWERS - len(bad))]])


def _images(row: Mapping[str, Any], key: str) -> list[str]:
    """Return the images of a prompt as small data URLs; none if their file is gone."""
    match = _ORIGIN.fullmatch(str(row.get("images") or ""))
    if not match:
        return []
    try:
        from PIL import Image

        images, _ = ImageColumn(match["path"], key).value(int(match["row"]))
        files = map(file_bytes, image_entries(images, match["path"]))
        return [_small(Image.open(io.BytesIO(data))) for data in islice(files, _MAX_IMAGES)]
    except Exception as error:  # noqa: BLE001 - a broken image must not prevent the page
        log.debug("no image of %s: %s", row.get("images"), error)
        return []


def _small(image: Any) -> str:
    """Return a small JPEG as a data URL."""
    image = image.convert("RGB")
    image.thumbnail((_PICTURE_PIXELS, _PICTURE_PIXELS))
    image.save(buffer := io.BytesIO(), "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# 95 % of the means over prompts lie within this many standard errors.
_SIGMAS = 1.96
_CORE = re.compile(r"val-core/(.+)/([^/]+)/((?:mean|maj)@\d+(?:/mean)?)")
_MOST_BARS = 400
# Phases that are part of another phase have no bar: `gen` includes generation and weight sync, `reward` the judge.
_BARS = [name for name in (*PHASES, "other", "testing", "save_checkpoint")
         if name not in ("generate_sequences", "reshard", "judge", "step")]  # fmt: skip
# Charts of lines: section, title, unit, metric and its label.
_CHARTS = pd.read_csv(Path(__file__).with_name("charts.tsv"), sep="\t", keep_default_na=False)


def sections(frame: pd.DataFrame) -> list[Section]:
    """Return the sections with charts, in the order of the page. frame: one row per step, one column per metric."""
    # Errors that never occurred are not shown.
    occurred = frame[[name for name in frame if name == "step" or (frame[name].fillna(0) != 0).any()]]
    return [
        _learning(frame),
        Section("Lengths of answers", charts=_charts(frame, "lengths")),
        Section("The update", charts=_charts(frame, "update")),
        _time(frame),
        Section("Memory", charts=_charts(frame, "memory")),
        Section("Errors and timeouts", charts=_charts(occurred, "errors")),
    ]


def _learning(frame: pd.DataFrame) -> Section:
    """Return the section on the reward of training and validation."""
    score = "critic/score/mean"
    charts: dict[str, dict[str, str]] = {"Training reward": {score: "score"}}
    losses = [name for name in frame.columns if re.match(r"(train|val)/loss", name)]
    charts["Loss per token"] = {name: name.replace("/", " ", 1) for name in losses}
    for name in frame.columns:
        if match := _CORE.fullmatch(name):
            source, variable, kind = match.groups()
            charts.setdefault(f"Validation: {variable}", {})[name] = f"{source} {kind.partition('/')[0]}"
    of_sources = [name for name in frame.columns if re.fullmatch(r"train/.*/score/mean", name)]
    charts["Training reward by source"] = {name: name[len("train/") : -len("/score/mean")] for name in of_sources}
    # A majority vote has no standard error.
    core = [name for names in charts.values() for name in names if name.startswith("val-core/") and "/mean@" in name]
    errors = {name: re.sub(r"val-core/(.*)/mean@", r"val-aux/\1/sem@", name) for name in core}
    drawn = [(title, _lines(frame, names, errors | {score: "critic/score/sem"})) for title, names in charts.items()]
    shown = [line_chart(title, lines) for title, lines in drawn if lines]
    return Section("Learning", "Bands are 95 % intervals of a mean over prompts.", shown)


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
    section.charts += _charts(frame, "speed")
    return section


def _charts(frame: pd.DataFrame, section: str) -> list[Any]:
    charts = _CHARTS[_CHARTS["section"] == section].groupby(["title", "unit"], sort=False)
    found = [(title, unit, _lines(frame, rows.set_index("metric").label)) for (title, unit), rows in charts]
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
