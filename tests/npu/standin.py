"""Run code with the stand-in device in a separate process, because torch's device type can be named only once."""

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.npu import build

_HERE = Path(__file__).parent
ROOT = _HERE.parent.parent
_PYTHON = [sys.executable, "-W", "error::UserWarning"]


def environment(count: int = 2, cap: int | None = None) -> dict[str, str]:
    """Return the variables of a process that finds ``count`` devices of ``cap`` bytes each, as on hardware."""
    build.library()
    paths = [str(_HERE / "doubles"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    wanted = {"PYTHONPATH": os.pathsep.join(paths), "RLTRAIN_STANDIN_NPUS": str(count), "OMP_NUM_THREADS": "1"}
    hidden = ("ASCEND_RT_VISIBLE_DEVICES", "RLTRAIN_STANDIN_BYTES")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | wanted | ({} if cap is None else {"RLTRAIN_STANDIN_BYTES": str(cap)})


@functools.cache
def _warm() -> subprocess.Popen[str]:
    """`tests.npu.warm`, which ends with this process because its input ends."""
    command = [*_PYTHON, "-m", "tests.npu.warm"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    warm = subprocess.Popen(command, env=environment(), cwd=ROOT, text=True, start_new_session=True, **pipes)
    atexit.register(warm.communicate)
    return warm


def run(name: str, *arguments: object, timeout: float = 120) -> None:
    """Run the function ``package.module:function`` with ``arguments`` (texts) in a process with the device."""
    warm = _warm()
    with tempfile.NamedTemporaryFile("r") as output:
        print(json.dumps([*name.split(":"), [*map(str, arguments)], output.name]), file=warm.stdin, flush=True)
        if not select.select([warm.stdout], [], [], timeout)[0]:
            os.killpg(warm.pid, signal.SIGKILL)
        code = warm.stdout.readline().strip()
        if not code:  # killed above, or ended by itself: the next check gets a new one
            _warm.cache_clear()
            warm.wait()
        said = output.read()
    assert code == "0", f"{said}\n{name}: exit code {code or f'none within {timeout} s'}"[-6000:]
