"""report.html: a run as one page that opens offline in any browser.

A table of means would hide tails, collapses and malformed responses. The page is one file made from the run folder, at
the end of a run or at any time. Parts without data are omitted. It draws no conclusions; alarms do that during the run.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
from yaml import YAMLError, safe_load

from rltrain.common.errors import RltrainError
from rltrain.common.images import file_bytes
from rltrain.common.storage import lines_of, patiently, read_json, run_folder, write_text
from rltrain.config.schema.keys import all_keys, followed
from rltrain.config.verl.keys import leaves_of
from rltrain.data.stored_images import ImageColumn, image_entries
from rltrain.run.report.charts import Section, Table, page
from rltrain.run.report.curves import sections
from rltrain.run.report.samples import (
    different_prompts_first,
    is_right,
    numbers_of,
    one_line,
    read_samples,
    sample_steps,
    shorten,
    texts_of,
)
from rltrain.run.report.table import by_step, learning_summary, mostly_truncated, nothing_earned, read_metrics, summary

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
    try:
        return dict(
            leaves_of(safe_load(patiently(run / "config.yaml", partial((run / "config.yaml").read_text, "utf-8"))))
        )
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
            rows.append([name, _text(settings[name]), f"as {other}" if other else _text(default)])
    return Section(
        "Settings that are not the defaults", tables=[Table(["key", "value", "default"], rows)] if rows else []
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _warnings(run: Path) -> Section:
    """Return the section of the warnings in train.log, the newest last."""
    rows = [[first, shorten(message, 400), str(times)] for first, message, times in warnings_of(run)[-_MOST_WARNINGS:]]
    tables = [Table(["first", "message", "times"], rows)] if rows else []
    return Section("Warnings", "From train.log, the newest last.", tables=tables)


def warnings_of(run: Path) -> list[tuple[str, str, int]]:
    """Return the warnings and errors of train.log: (first time, text, number of times)."""
    counts: dict[str, tuple[str, int]] = {}
    for line in lines_of(run / "train.log"):
        if _WARNING.match(line):
            message = line.split(" ", 2)[2]
            first, times = counts.get(message, (line[:19], 0))
            counts[message] = (first, times + 1)
    return [(first, message, times) for message, (first, times) in counts.items()]


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
    image = image.convert("RGB")
    image.thumbnail((_PICTURE_PIXELS, _PICTURE_PIXELS))
    image.save(buffer := io.BytesIO(), "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
