"""Update the columns ``verl`` and ``default`` of rltrain/config/verl/keys.tsv from verl's released wheels.

    python -m scripts.verl_keys [--wheels FOLDER] [VERSION...]

It reads the key names and defaults from the YAML files and the configuration classes of each wheel, keeps all
hand-written columns, adds rows for new keys, and lists the keys of verl without a row. VERSION: the releases (default:
the releases in the file). FOLDER: has the wheels; otherwise pip downloads them.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rltrain.config.schema.keys import is_known
from rltrain.config.verl.keys import rename, verdict
from rltrain.config.verl.table import FILE, Row, read

RELEASES = "@releases"
# The composed trees of the trainer, and the trainers that add keys to it.
TREES = ("verl/trainer/config/_generated_ppo", "verl/experimental/")
# The groups of rows in the file. Rows with other actions, or none, are in "key" or "pattern".
GROUPS = ("list", "sentence", "key", "pattern", "differs", "file", "named", "trainer", "elsewhere")


def main(argv: Sequence[str] | None = None) -> None:
    """Rewrite the file and print the keys without a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="a folder with the wheels")
    parser.add_argument("versions", nargs="*")
    arguments = parser.parse_args(argv)
    rows = read(FILE.read_text(encoding="utf-8").splitlines())
    named = next(row.note.split() for row in rows if row.key == RELEASES)
    versions = arguments.versions or named
    with tempfile.TemporaryDirectory() as folder:
        found = {version: keys_of_wheel(wheel(version, arguments.wheels or Path(folder))) for version in versions}
    rows = merge([row._replace(note=" ".join(versions)) if row.key == RELEASES else row for row in rows], found)
    FILE.write_text(text_of(rows), encoding="utf-8")
    missing = [row for row in rows if row.verl and not row.action and not is_answered(row.key)]
    print(f"{len({row.key for row in rows if row.verl})} keys of verl; {len(missing)} have no row:")
    print("".join(f"  {row.key}  ({row.verl})\n" for row in missing), end="")


def wheel(version: str, folder: Path) -> Path:
    """Return the wheel of a release; download it to ``folder`` if it is missing."""
    if not any(folder.glob(f"verl-{version}-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", str(folder), f"verl=={version}"], check=True)
    return next(folder.glob(f"verl-{version}-*.whl"))


def keys_of_wheel(path: Path) -> dict[str, list[str]]:
    """Return the dotted keys of a release, each with its defaults as JSON."""
    keys: dict[str, list[str]] = {}
    with zipfile.ZipFile(path) as archive:
        names = sorted(archive.namelist())
        classes = {
            node.name: node
            for name in names
            if name.endswith(".py") and any(word in name for word in ("config", "profiler", "skip"))
            for node in ast.parse(archive.read(name)).body
            if isinstance(node, ast.ClassDef)
        }
        for name in names:
            if name.startswith(TREES) and name.endswith(".yaml"):
                for key, default in leaves(yaml.safe_load(archive.read(name)), classes):
                    defaults = keys.setdefault(key, [])
                    if (text := json.dumps(default)) not in defaults:
                        defaults.append(text)
    return keys


def leaves(tree: Mapping[str, Any], classes: Mapping[str, ast.ClassDef], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a tree, and the fields of the classes that its sections name, with their defaults."""
    for name, value in tree.items():
        if name in ("_target_", "defaults", "hydra"):
            continue
        if isinstance(value, dict) and value:
            yield from leaves(value, classes, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
    for name, default in fields(tree.get("_target_", ""), classes).items():
        if name not in tree:
            yield f"{prefix}{name}", default


def fields(name: str, classes: Mapping[str, ast.ClassDef]) -> dict[str, Any]:
    """Return the fields of a class and of its bases, with their defaults; ``{}`` for a field with fields."""
    if (node := classes.get(name.rpartition(".")[2])) is None:
        return {}
    found: dict[str, Any] = {}
    for base in node.bases:
        found |= fields(ast.unparse(base), classes)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_":
            types = {part.id for part in ast.walk(item.annotation) if isinstance(part, ast.Name)}
            found[item.target.id] = {} if types & classes.keys() else literal(item.value)
    return found


def literal(value: ast.expr | None) -> Any:
    """Return the default in a line of a dataclass, None if it is computed."""
    if isinstance(value, ast.Call):
        options = {option.arg: option.value for option in value.keywords}
        factory = options.get("default_factory")
        if factory is not None:
            return {"list": [], "dict": {}}.get(ast.unparse(factory))
        value = options.get("default")
    try:
        return ast.literal_eval(value) if value is not None else None
    except ValueError:
        return None


def merge(rows: Sequence[Row], found: Mapping[str, Mapping[str, list[str]]]) -> list[Row]:
    """Return the rows with new columns of verl, and rows for keys that had none. found: release -> keys."""
    releases = list(found)
    defaults: dict[str, list[str]] = {}
    has: dict[str, list[int]] = {}
    for number, keys in enumerate(found.values()):
        for key, texts in keys.items():
            has.setdefault(key, []).append(number)
            defaults.setdefault(key, []).extend(text for text in texts if text not in defaults.get(key, []))
    machine = {key: (spans(releases, numbers), " | ".join(defaults[key])) for key, numbers in has.items()}
    for section in {key[:end] for key in has for end, mark in enumerate(key) if mark == "."}:
        machine.pop(section, None)
    written = [row for row in rows if row.action not in ("", "same")]
    answered = {row.key for row in written if group(row) == "key"}
    new = [Row(key, action="same" if is_known(key) else "") for key in machine if key not in answered]
    kept = list[Row]()
    for row in [*written, *new]:
        # Of several rows of a key only the first one has these columns.
        verl, default = machine.pop(row.key, ("", "")) if group(row) == "key" else ("", "")
        kept.append(row._replace(verl=verl, default=default))
    return sorted(kept, key=lambda row: (GROUPS.index(group(row)), row.key if group(row) == "key" else ""))


def group(row: Row) -> str:
    """Return the section of the file for a row; the order of patterns decides which one applies."""
    if row.action in GROUPS:
        return row.action
    return "pattern" if "*" in row.key else "key"


def spans(releases: Sequence[str], numbers: Sequence[int]) -> str:
    """Return releases as ranges, such as "0.5.0-0.6.1 0.9.0"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return " ".join("-".join(dict.fromkeys((releases[part[0]], releases[part[-1]]))) for part in ranges)


def is_answered(key: str) -> bool:
    """Return True if the schema or a row of the file covers a key of verl."""
    own_key = rename(key)
    return bool(is_known(own_key) or is_known(f"{own_key}_per_gpu") or verdict(own_key, "x"))


def text_of(rows: Sequence[Row]) -> str:
    """Return the text of the file."""
    return "".join("\t".join(line).rstrip() + "\n" for line in (Row._fields, *rows))


if __name__ == "__main__":
    main()
