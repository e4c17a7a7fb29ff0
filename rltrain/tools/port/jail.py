"""Run one shell script and report the commands that it would have started: a script for `run_in_jail`.

Only a shell can expand a launch script's variables, but a third-party script may do anything. So bash runs in separate
namespaces whose file system is a small tmpfs with copies of the text tools, without network, other processes and files
of the machine. Any other program is a stub that records its arguments. If the kernel grants no namespaces, nothing is
run. Imports nothing of rltrain.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

NO_JAIL = 3  # exit code: the kernel grants no namespaces
_MOUNTS, _USER, _PROCESSES, _NETWORK, _IPC = 0x00020000, 0x10000000, 0x20000000, 0x40000000, 0x08000000
_PRIVATE, _NO_SUID, _NO_DEVICES, _DETACH = 1 << 18 | 1 << 14, 2, 4, 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NOBODY = 65534
_MEMORY_BYTES, _FILE_BYTES, _MOST_BYTES = 256 << 20, 8 << 20, 16 << 20


def main() -> None:
    """Read the job from the descriptor, and write the records there in its place."""
    spec = os.fdopen(int(sys.argv[1]), "r+", encoding="utf-8")
    job = json.load(spec)
    _enter(job["root"])
    for inside, content in job["files"].items():
        _write(job["root"], inside, content.encode())
    for inside, outside in job["copies"].items():
        with open(outside, "rb") as file:
            _write(job["root"], inside, file.read())
    for inside in job["folders"]:
        os.makedirs(_under(job["root"], inside), exist_ok=True)
        os.chmod(_under(job["root"], inside), 0o777)
    _lock_in(job["root"])
    report = {"finished": _run(job), "calls": _records(job["records"])}
    spec.seek(0)
    spec.truncate()
    json.dump(report, spec)
    spec.close()


def _enter(root: str) -> None:
    """Continue as the first process of new namespaces, with an empty file system mounted at ``root``."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    apart, user, group = _MOUNTS | _PROCESSES | _NETWORK | _IPC, os.getuid(), os.getgid()
    # A privileged user needs no user namespace, which some containers forbid.
    if user != 0 or libc.unshare(apart) != 0:
        if libc.unshare(apart | _USER) != 0:
            os._exit(NO_JAIL)
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{_NOBODY} {user} 1"),
            ("gid_map", f"{_NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="utf-8") as stream:
                stream.write(line)
    # A new process-id namespace holds only children; when its first process ends, the kernel ends all others.
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    private = libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE), None)
    size = ctypes.c_ulong(_NO_SUID | _NO_DEVICES)
    if private or libc.mount(b"jail", root.encode(), b"tmpfs", size, b"size=64m,nr_inodes=20k,mode=755"):
        os._exit(NO_JAIL)


def _lock_in(root: str) -> None:
    """Make ``root`` the whole file system and drop the privileges."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.chdir(root)
    # The old root is mounted under the new one, at the same place, and is unmounted from there.
    if libc.pivot_root(b".", b".") or libc.umount2(b".", _DETACH):
        os._exit(NO_JAIL)
    os.chdir("/")
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _under(root: str, inside: str) -> str:
    """Return the path in the jail; raise ValueError if it leaves it. The names are from the script, and the machine's
    files are still mounted."""
    if not inside.startswith("/") or os.path.normpath(inside.lstrip("/")).split("/")[0] == "..":
        raise ValueError(f"{inside!r} is not a path in the jail")
    return root + inside


def _write(root: str, inside: str, content: bytes) -> None:
    path = _under(root, inside)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, 0o755)


def _run(job: dict[str, Any]) -> bool:
    """Run the script. Return True if it ended within its time."""

    def limit() -> None:
        for kind, size in (
            (resource.RLIMIT_CPU, job["seconds"] + 1),
            (resource.RLIMIT_AS, _MEMORY_BYTES),
            (resource.RLIMIT_FSIZE, _FILE_BYTES),
            (resource.RLIMIT_NPROC, job["num_tasks"]),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (size, size))

    with open("/tmp/output", "wb") as output:
        process = subprocess.Popen(
            job["command"],
            env=job["environment"],
            cwd=job["folder"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            preexec_fn=limit,
        )
    process.stdin and process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(job["seconds"])
        return True
    return False


def _records(folder: str) -> list[tuple[list[str], list[str]]]:
    """Return the words and the environment of each recorded command, in order of time."""
    records, room = [], _MOST_BYTES
    names = sorted(name for name in os.listdir(folder) if not name.endswith(".env"))
    for name in names:
        texts = []
        for path in (f"{folder}/{name}", f"{folder}/{name}.env"):
            with suppress(OSError), open(path, "rb") as file:
                content = file.read(room)
                room -= len(content)
                texts.append(content.decode(errors="replace").split("\0")[:-1])
        if len(texts) == 2:
            records.append((texts[0], texts[1]))
    return records


if __name__ == "__main__":
    main()
