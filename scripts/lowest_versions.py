"""The lowest versions that setup.py allows, as pins for pip-audit: python scripts/lowest_versions.py [EXTRA ...]"""

import runpy
import sys
from pathlib import Path

import setuptools
from packaging.requirements import Requirement


def lowest(*extras: str) -> list[str]:
    """Return NAME==VERSION for each requirement with a lower bound that applies to this Python."""
    found: dict = {}
    setuptools.setup = lambda **given: found.update(given)
    runpy.run_path(str(Path(__file__).parents[1] / "setup.py"))
    wanted = [*found["install_requires"], *(line for extra in extras for line in found["extras_require"][extra])]
    pins = []
    for requirement in map(Requirement, wanted):
        versions = [each.version for each in requirement.specifier if each.operator in (">=", "==")]
        if versions and (requirement.marker is None or requirement.marker.evaluate()):
            pins.append(f"{requirement.name}=={versions[0]}")
    return pins


if __name__ == "__main__":
    sys.stdout.write("".join(f"{pin}\n" for pin in lowest(*sys.argv[1:])))
