"""Each isolation layer for programs of the model works alone, without the audit hook."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Runs in a separate process: applies one layer, and tries native calls, which raise no audit event.
TRY = """
import ctypes, hashlib, json, os, subprocess, sys, threading
from rltrain.runtime.slots import jail
layer, outside, parent = sys.argv[1], sys.argv[2], int(sys.argv[3])
work = os.getcwd()
libc, folder = ctypes.CDLL(None), os.open(outside, os.O_RDONLY)
granted = {
    "namespaces": lambda: jail.separate(work, outside + "/root"),
    "landlock": lambda: jail.landlock(work),
    "seccomp": jail.seccomp,
}[layer]()
if layer == "namespaces":
    jail.drop_capabilities()

def works(attempt):
    try:
        return (result := attempt()) is not False and result != -1  # 0 is the success of a system call
    except (OSError, subprocess.SubprocessError):
        return False

def thread():
    done = []
    started = threading.Thread(target=done.append, args=(1,))
    started.start()
    started.join()
    return bool(done)

def socket():
    import socket
    return socket.create_connection(("127.0.0.1", int(sys.argv[4])), 5)

def shared():
    import _posixshmem
    return os.close(_posixshmem.shm_open("/" + os.path.basename(os.path.dirname(outside)), os.O_CREAT | os.O_RDWR))

tries = {
    "work": lambda: open("a", "w").write("x") and os.rename("a", "b") is None and open("b").read() == "x",
    "thread": thread,
    "null": lambda: open("/dev/null", "w").write("x"),
    "library": lambda: os.listdir(os.path.dirname(os.__file__)),
    "read": lambda: open(outside + "/file").read(),
    "write": lambda: open(outside + "/new", "w"),
    "truncate": lambda: os.close(os.open(outside + "/file", os.O_RDONLY | os.O_TRUNC)),
    "write library": lambda: os.open(os.path.dirname(os.__file__) + "/zz_jail.py", os.O_CREAT | os.O_WRONLY),
    "chmod": lambda: libc.chmod((outside + "/file").encode(), 0o777),
    "attributes": lambda: libc.syscall(465, -100, (outside + "/file").encode(), 0, None, ctypes.c_size_t(0)),
    "shared memory": shared,
    "socket": socket,
    "signal": lambda: os.kill(parent, 0),
    "process": lambda: subprocess.run(["/bin/true"]),
    "fork": lambda: os.fork() or getattr(os, '_exit')(0),
    "trace": lambda: libc.ptrace(0x4206, parent, None, None),
    "new namespace": lambda: libc.unshare(0x10000000),
    "mount": lambda: libc.mount(b"x", work.encode(), b"tmpfs", 0, None),
}
print(json.dumps({"granted": granted, **{name: works(attempt) for name, attempt in tries.items()}}))
"""
ALWAYS = {"work", "thread", "null", "library"}
REFUSED = {
    "namespaces": {
        "read",
        "write",
        "truncate",
        "write library",
        "chmod",
        "attributes",
        "shared memory",
        "socket",
        "signal",
        "mount",
    },
    "landlock": {"read", "write", "truncate", "write library", "shared memory", "process", "mount", "trace"},
    "seccomp": {
        "truncate",
        "chmod",
        "attributes",
        "socket",
        "signal",
        "process",
        "fork",
        "trace",
        "new namespace",
        "mount",
    },
}
# A kernel with neither: a filter refuses what the jail asks for.
NEITHER = """
import sys
from rltrain.runtime.slots import jail, program
assert jail.seccomp("unshare 272 97 landlock_create_ruleset 444 444", ())
print(program.end_of_program("open('/etc/passwd')", seconds=60, accepted=sys.argv[1] == "yes"))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="layers of Linux")
@pytest.mark.parametrize("layer", REFUSED)
def test_a_layer_holds_alone(tmp_path, layer):
    outside, work = tmp_path / "outside", tmp_path / "work"
    (outside / "root").mkdir(parents=True)
    work.mkdir()
    (outside / "file").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [layer, str(outside), str(os.getpid()), str(server.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, "-c", TRY, *arguments], cwd=work, stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}
        )
    for left in (Path(os.__file__).with_name("zz_jail.py"), Path("/dev/shm", tmp_path.name)):
        left.unlink(missing_ok=True)
    found = json.loads(done.stdout)
    if not found.pop("granted"):
        pytest.skip(f"this kernel does not grant {layer}")
    worked = {name for name, result in found.items() if result}
    assert worked >= ALWAYS
    assert not worked & REFUSED[layer]
    assert (outside / "file").read_text() == ("" if "truncate" in worked else "secret")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a filter of Linux")
@pytest.mark.parametrize("accepted", ["yes", "no"])
def test_programs_are_refused_without_namespaces_and_landlock_unless_a_key_accepts_it(accepted):
    done = subprocess.run([sys.executable, "-c", NEITHER, accepted], capture_output=True, text=True, cwd=ROOT)
    if accepted == "yes":
        assert "exit_code=1, layers={'namespaces': 0, 'landlock': 0" in done.stdout, done.stderr
    else:
        assert "ConfigError" in done.stderr
        assert "reward.allow_unsandboxed_code=True" in done.stderr
