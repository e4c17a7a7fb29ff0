"""Run code where the stand-in device is: in a process of its own, because torch's device type is named once."""

import os
import subprocess
import sys
from pathlib import Path

from tests.npu import build

_HERE = Path(__file__).parent
ROOT = _HERE.parent.parent


def environment(count: int = 2, cap: int | None = None) -> dict[str, str]:
    """Variables of a process that finds ``count`` devices of ``cap`` bytes each, as it would on hardware.

    Builds the device first. Raises RuntimeError where no compiler is there.
    """
    build.library()
    paths = [str(_HERE / "doubles"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    wanted = {"PYTHONPATH": os.pathsep.join(paths), "RLTRAIN_STANDIN_NPUS": str(count), "OMP_NUM_THREADS": "1"}
    hidden = ("ASCEND_RT_VISIBLE_DEVICES", "RLTRAIN_STANDIN_BYTES")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | wanted | ({} if cap is None else {"RLTRAIN_STANDIN_BYTES": str(cap)})


def run(code: str, *arguments: object, count: int = 2, cap: int | None = None, timeout: float = 120) -> str:
    """Run ``code``, or the function ``package.module:function`` with ``arguments`` (as texts), in a process with the
    device.

    Returns what it printed. Raises AssertionError with its output where it fails.
    """
    if ":" in code.splitlines()[0] and " " not in code.splitlines()[0]:
        module, function = code.split(":")
        code = f"import sys, torch_npu\nfrom {module} import {function}\n{function}(*sys.argv[1:])"
    command = [sys.executable, "-W", "error::UserWarning", "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment(count, cap), cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-6000:]
    return done.stdout
