"""``python -m rltrain.collect RUN``: one archive for a bug report.

Secrets are masked. Only the end of a large file is included.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from rltrain.common.errors import DataError, command
from rltrain.common.logs import TRAIN_LOG
from rltrain.common.secrets import MASK, is_secret, masked_text
from rltrain.common.storage import read_json

# Patterns in the run folder, the most useful first, because the archive has a size limit. Of the samples, only the
# newest are included.
_WANTED = (
    "config*.yaml", "plan*.json", "env*.json", "tracking.json", TRAIN_LOG, "metrics.jsonl", "reward.log", "logs/*",
    "incidents/*", "incidents/*/*", "global_step_*/manifest.json", "global_step_*/progress.json",
    "earlier_*/metrics.jsonl", "evaluation_*/metrics.jsonl",
)  # fmt: skip
_NEWEST_SAMPLES = 3
MOST_BYTES = 200 * 2**20
MOST_OF_A_FILE = 20 * 2**20
# Formats of a run's samples and incidents, which are not text.
_BINARY = (".parquet", ".pt", ".safetensors", ".npz")
# A name and its value, as YAML, JSON, Python and shells write them.
_NAMED = re.compile(r"([\w.-]+)[\"']?\s*[:=]\s*[\"']?([^\s\"',;&{}()\[\]]+)")
# A name at the start of a line, its value, and further indented lines, as in YAML block scalars.
_ENTRY = re.compile(
    r"(?m)^([ \t]*)((?:- )?[\"']?([\w.-]+)[\"']?[ \t]*:[ \t]*)(?![\[{]|null|''|\"\")"
    r"(\S.*(?:\n\1[ \t]+\S.*|\n[ \t]*(?=\n))*)$"
)


def collect(run: Path, archive: Path, most_bytes: int = MOST_BYTES, most_of_a_file: int = MOST_OF_A_FILE) -> list[str]:
    """Write the archive and return the names in it. Raises DataError if the folder is not a run."""
    if not (run / TRAIN_LOG).exists() and not (run / "config.yaml").exists():
        raise DataError(
            f"{run} is not a run folder: it has neither {TRAIN_LOG} nor config.yaml (trainer.default_local_dir)."
        )
    names: list[str] = []
    files = [(name, path) for name, path in _files(run) if not path.is_symlink()]
    secrets = _secret_values((path, _text_of(path, most_of_a_file) or "") for _, path in files)
    room = most_bytes
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, path in files:
            text, data = _text_of(path, most_of_a_file), b""
            if text is not None:
                data = _masked(text, secrets).encode(errors="replace")
            elif path.suffix in _BINARY:
                data = _end_of(path, most_of_a_file)[1]
            if text is None and (not data or any(secret.encode() in data for secret in secrets)):
                sys.stderr.write(f"left out: {name} {'holds a secret' if data else 'cannot be read as text'}\n")
            # Skip this file only, because smaller files after it may still fit.
            elif len(data) <= room:
                room -= len(data)
                file.writestr(name, data)
                names.append(name)
    return names


def _files(run: Path) -> Iterator[tuple[str, Path]]:
    samples = sorted(run.glob("samples/**/*.parquet"), key=lambda path: path.stat().st_mtime)[-_NEWEST_SAMPLES:]
    paths = [path for pattern in _WANTED for path in sorted(run.glob(pattern))] + samples
    # Links out of the folder are skipped, because a link may point to any file of the user.
    inside = [path for path in paths if path.resolve().is_relative_to(run.resolve())]
    yield from ((str(path.relative_to(run)), path) for path in inside if path.is_file())
    # Ray's folder is read from env.json and not from the logs, because data and model can write to the logs.
    folder = Path(str((read_json(run / "env.json") or {}).get("ray_logs") or ""))
    if folder.name == "logs" and folder.parent.name.startswith("session_"):
        yield from ((f"ray/{path.name}", path) for path in sorted(folder.glob("*")) if path.is_file())


def _text_of(path: Path, most: int) -> str | None:
    """Return the end of a text file; None for another file, such as one in UTF-16."""
    if path.suffix in _BINARY:
        return None
    left_out, data = _end_of(path, most)
    text = data.decode("utf-8", "replace")
    if "\0" in text or text.count("\ufffd") * 20 > len(text):
        return None
    return f"[{left_out} bytes left out]\n{text}" if left_out else text


def _secret_values(texts: Iterable[tuple[Path, str]]) -> list[str]:
    """Return the values of secret names in the files and in this environment, longest first.

    JSON-escaped and URL-quoted forms are included.
    """
    values: set[str] = set()

    def add(name: str, value: str, *, sure: bool) -> None:
        # Short values and plain words are excluded, because they would match everywhere in free text.
        least = 6 if sure else 8
        lines = {line.strip().strip("'\",") for line in value.splitlines()} if is_secret(name, value) else set()
        values.update(line for line in lines if len(line) >= least and (sure or not line.isalpha()))

    for name, value in os.environ.items():
        add(name, value, sure=True)
    for path, text in texts:
        is_sure = path.suffix in (".yaml", ".yml", ".json")
        pairs = [*_NAMED.findall(text), *(match.group(3, 4) for match in _ENTRY.finditer(text) if is_sure)]
        for name, value in pairs:
            add(name, value, sure=is_sure)
    values |= {json.dumps(value)[1:-1] for value in values} | {quote(value, safe="") for value in values}
    return sorted(values - {MASK}, key=len, reverse=True)


def _end_of(path: Path, most: int) -> tuple[int, bytes]:
    """Return the number of bytes skipped, and the bytes after them."""
    with open(path, "rb") as file:
        # Omit a large parquet file, because it is unreadable when truncated. Keep the end of a log, because errors are
        # there.
        left_out = max(0, path.stat().st_size - most) if path.suffix != ".parquet" else 0
        file.seek(left_out)
        return left_out, file.read()


def _masked(text: str, secrets: list[str]) -> str:
    """Mask values by their names, and every other occurrence of a secret."""

    def entry(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}{MASK}" if is_secret(match[3], match[4].rstrip(",")) else match[0]

    text = _ENTRY.sub(entry, text)
    for secret in secrets:
        text = text.replace(secret, MASK)
    return masked_text(text)


@command
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="rltrain collect",
        description="Pack the files that a bug report needs into one archive: configuration, plan, versions, logs, "
        "metrics, incidents, newest responses and Ray's logs, no weights. Values of keys that name a secret are "
        f"masked, large files are cut to their ends, and the archive has at most {MOST_BYTES >> 20} MiB. Check it "
        "before you share it: it contains prompts and responses.",
    )
    parser.add_argument("run", type=Path, help="run folder (trainer.default_local_dir)")
    parser.add_argument("archive", type=Path, nargs="?", help="default: NAME_OF_THE_RUN-report.zip in this folder")
    arguments = parser.parse_args(argv)
    run, archive = arguments.run, arguments.archive or Path(f"{arguments.run.resolve().name}-report.zip")
    names = collect(run, archive)
    size = archive.stat().st_size / 2**20
    sys.stdout.write(
        f"{archive}: {len(names)} files, {size:.1f} MiB. Look through it before you share it: "
        f"{', '.join(names[:8])} …\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
