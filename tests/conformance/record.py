"""Record the API that `uses` lists for all supported versions: ``python -m tests.conformance.record`` writes
api.json.
"""

from __future__ import annotations

import ast
import json
import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.conformance.api import Api, parameters
from tests.conformance.scan import Scan
from tests.conformance.uses import PACKAGES, Package
from tests.conformance.wheels import Wheel

ROOT = Path(__file__).parents[2] / "rltrain"
FILE = Path(__file__).with_name("api.json")


def scans(package: Package) -> dict[str, Scan]:
    """Return the scans of the adapters, by file."""
    files = [file for pattern in package.files for file in sorted(ROOT.glob(pattern))]
    return {str(file.relative_to(ROOT)): Scan(file, package.foreign) for file in files}


def imported(package: Package) -> set[str]:
    """Return the package's names that adapters import, as ``module:Name``."""
    return {path for scan in scans(package).values() for path in scan.imported.values()}


def listed(package: Package) -> list[str]:
    """Return the paths of the listed attributes; a trailing ? marks attributes that some versions lack."""
    return [f"{owner}{'' if owner.endswith(':') else '.'}{name}"
            for owner, names in package.attributes.items() for name in names.split()]  # fmt: skip


def own_parameters(file: str, path: str) -> list[str]:
    """Return the parameters of a method of ours, ``Class.method``."""
    name, _, method = path.partition(".")
    owner = next(node for node in ast.parse((ROOT / file).read_text()).body if getattr(node, "name", "") == name)
    return parameters(next(node for node in owner.body if getattr(node, "name", "") == method))[1:]


def places(package: Package, set_of_wheels: tuple[str, ...]) -> dict[str, str]:
    """Map each listed path (``owner.name``, an import) to its place in this set."""
    return {
        path: _replaced(package, set_of_wheels, path)
        for path in sorted(
            {*(path.rstrip("?") for path in listed(package)), *imported(package), *package.called.values()}
        )
    }


def _replaced(package: Package, set_of_wheels: tuple[str, ...], path: str) -> str:
    """Return the path in a package that derives from the listed one."""
    derived = len(set_of_wheels) > 1
    owner = next(
        (owner for owner in package.replaced if derived and (path == owner or path.startswith(f"{owner}."))), ""
    )
    return package.replaced[owner] + path[len(owner) :] if owner else path


def record(package: Package) -> dict[str, Any]:
    """Return takes: path -> versions -> parameters; and texts: place -> versions -> the listed texts that it
    contains."""
    takes: dict[str, dict[str, Any]] = {}
    texts: dict[str, dict[str, Any]] = {}
    for names in package.versions:
        key = " + ".join(names)
        api = Api([Wheel(*name.split()) for name in names])
        for path, place in places(package, names).items():
            found = api.takes(place)
            _join(takes.setdefault(path, {}), key, None if found is None else " ".join(found))
        for place, wanted in package.texts.items():
            where = _replaced(package, names, place)
            if where.split(".")[0] not in api.packages:
                continue
            have = api.names(where) if ":" in where else None
            found = [text for text in wanted.replace("?", "").split()
                     if (api.holds(where, text) if have is None else text in have)]  # fmt: skip
            _join(texts.setdefault(place, {}), key, " ".join(found))
    return {"takes": takes, "texts": texts}


def _join(versions: dict[str, Any], key: str, value: Any) -> None:
    """Join versions with equal records."""
    same = next((names for names, other in versions.items() if other == value), None)
    versions[f"{same}, {key}" if same else key] = versions.pop(same, value)


def recorded(package: str, path: str) -> list[str]:
    """Return the parameter names of the newest recorded version. Doubles in tests accept no others."""
    takes = list(_api()[package]["takes"][path].values())[-1]
    return [name.strip("=*") for name in takes.split()]


@cache
def _api() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def main() -> None:
    logging.getLogger("pip").setLevel(logging.ERROR)
    found = {name: record(package) for name, package in PACKAGES.items()}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(
        f"{FILE}: recorded from {', '.join(sorted({v for p in PACKAGES.values() for s in p.versions for v in s}))}\n"
    )


if __name__ == "__main__":
    main()
