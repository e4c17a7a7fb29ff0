"""Build the stand-in device with g++ once per machine, and load it."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

_HERE = Path(__file__).parent
_SOURCES = ("device.cpp", "memory.cpp", "collectives.cpp")
_NAME = "rltrain_standin"
_FLAGS = ("-O1", "-std=c++20", "-fPIC", f"-DTORCH_EXTENSION_NAME={_NAME}")


def library() -> Path:
    """Return the built extension, which is built if it is missing. Raises RuntimeError without a compiler."""
    folder = _cache() / _fingerprint()
    target = folder / f"{_NAME}.so"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes may want it at once: one builds, the others wait for it.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _compile(folder, target)
    return target


def load() -> ModuleType:
    """Return the extension; importing it makes our device torch's spare device type."""
    spec = importlib.util.spec_from_file_location(_NAME, library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rltrain" / "standin"


def _fingerprint() -> str:
    parts = [file.read_bytes() for pattern in ("*.cpp", "*.h") for file in sorted(_HERE.glob(pattern))]
    return hashlib.sha256(b"\0".join([*parts, f"{_FLAGS} {torch.__version__} {sys.version}".encode()])).hexdigest()[:16]


def _compile(folder: Path, target: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError(
            "The tests of the stand-in device need a C++ compiler, and g++ is not there: apt-get install g++ "
            "(or name another in CXX)."
        )
    paths = [*include_paths(), sysconfig.get_paths()["include"]]
    flags = [*_FLAGS, *(f"-isystem{path}" for path in paths)]
    objects = [folder / Path(source).with_suffix(".o").name for source in _SOURCES]
    runs = [
        [compiler, *flags, "-c", str(_HERE / source), "-o", str(made)]
        for source, made in zip(_SOURCES, objects, strict=True)
    ]
    _run_all(runs)
    places = [part for path in library_paths() for part in (f"-L{path}", f"-Wl,-rpath,{path}")]
    libraries = [f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_python")]
    unfinished = target.with_suffix(".part")
    _run_all([[compiler, "-shared", *map(str, objects), *places, *libraries, "-o", str(unfinished)]])
    unfinished.rename(target)


def _run_all(runs: list[list[str]]) -> None:
    started = [subprocess.Popen(run, stderr=subprocess.PIPE, text=True) for run in runs]
    said = [each.communicate()[1] for each in started]
    if any(each.returncode for each in started):
        raise RuntimeError("The stand-in device does not compile:\n" + "\n".join(said)[-4000:])
