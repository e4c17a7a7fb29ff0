"""Runs one program that a model wrote: a script for a fresh interpreter (``python -I -S jail.py DESCRIPTOR``).

Kernel limits first, then namespaces of its own where the kernel grants them, then an audit hook that refuses sockets,
processes and files outside the working directory. The hook is no wall: docs/rewards.md says what it does not stop.
Imports nothing of rltrain.
"""

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

MAX_FILE_BYTES = 8 << 20
_MAX_THREADS = 64  # of a program
_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000  # user, process ids, network, IPC
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_REFUSED = (
    *("socket.", "subprocess.", "ctypes.", "resource.", "pty.", "syslog.", "shutil.", "os.exec", "os.posix_spawn"),
    *("os.spawn", "os.system", "os.fork", "os.kill", "os.link", "os.symlink", "os.chmod", "os.chown", "os.chflags"),
    *("os.lchflags", "os.chdir", "os.chroot", "os.setxattr", "os.removexattr", "signal.pthread_kill", "sqlite3."),
)
_REFUSED_IMPORTS = ("ctypes", "_ctypes", "_posixsubprocess", "_testcapi", "_xxsubinterpreters", "_interpreters")
_WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.utime")
_REMOVED = ("mkfifo", "mknod", "pidfd_open", "setns", "unshare")  # no audit event tells of them
_READS = ("os.listdir", "os.scandir")


def main() -> None:
    """Read what to run from the descriptor, shut the doors, run it. A function's result goes to stdout as JSON."""
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as stream:
        job = json.load(stream)
    _limit(job["seconds"], job["memory_mb"])
    _separate(job["parent"])
    # A module that is imported already raises no audit event when it is imported again.
    sys.modules.pop("ctypes", None)
    sys.modules.pop("_ctypes", None)
    for name in _REMOVED:
        sys.modules["posix"].__dict__.pop(name, None)
        os.__dict__.pop(name, None)
    sys.argv = ["answer.py"]
    # Opened now, because afterwards the hook lets nothing be written outside of the folder.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    library = os.path.dirname(os.path.realpath(os.__file__))
    sys.addaudithook(_doorkeeper(os.path.realpath(os.getcwd()), library))
    _run(job["code"], job["function"], job["arguments"], nowhere)


def _limit(seconds: int, memory_mb: int) -> None:
    sizes = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NPROC: tasks_of_user(os.getuid()) + _MAX_THREADS,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, size in sizes.items():
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (size, size))


def tasks_of_user(user: int) -> int:
    """Processes and threads of a user: the kernel's limit is on all of them, not on those of the program."""
    tasks = 0
    with suppress(OSError):  # systems without /proc
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # it has ended meanwhile
                if os.stat(f"/proc/{name}").st_uid == user:
                    tasks += len(os.listdir(f"/proc/{name}/task"))
    return tasks


def _separate(parent: int) -> None:
    """Go on as the first process of new namespaces: no network at all, and its end is the end of all it started."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl took effect, and then no signal comes
        os._exit(1)
    # Without it a set-uid program could give back what is taken away here.
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NAMESPACES) != 0:
        return
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with suppress(OSError), open(f"/proc/self/{name}", "w", encoding="utf-8") as stream:
            stream.write(line)
    # A new process-id namespace holds only children, so a child goes on and this process hands its exit code up.
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _doorkeeper(folder: str, library: str) -> Any:
    """The audit hook. All it needs is bound here, out of the way of a program that replaces functions or builtins."""
    refused, imports, writes, reads, error = _REFUSED, _REFUSED_IMPORTS, _WRITES, _READS, PermissionError
    write_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    may_write = _inside(folder, (folder,))
    may_read = _inside(folder, (folder, library, "/dev/null", "/dev/urandom"))

    def hook(event: str, arguments: tuple) -> None:
        allowed = True
        if event == "open":
            allowed = (may_write if arguments[2] & write_flags else may_read)(arguments[0])
        elif event == "import":
            allowed = arguments[0] not in imports
        elif event in reads:
            allowed = may_read(arguments[0])
        elif event in writes:
            allowed = may_write(arguments[0]) and (event != "os.rename" or may_write(arguments[1]))
        elif event.startswith(refused):
            allowed = False
        if not allowed:
            raise error(event + " is not allowed here")

    return hook


def _inside(folder: str, roots: tuple[str, ...]) -> Any:
    # By text alone, without os.path, which the program may have replaced. It cannot make links, so text is enough.
    kind, text, number, raw, prefixes = type, str, int, bytes, tuple(root + "/" for root in roots)

    def inside(path: Any) -> bool:
        if path is None or kind(path) is number:  # the working directory; a file that is open already
            return True
        if kind(path) is raw:
            path = path.decode("utf-8", "surrogateescape")
        if kind(path) is not text:
            return False
        parts: list[str] = []
        for part in (path if path.startswith("/") else folder + "/" + path).split("/"):
            if part == "..":
                parts = parts[:-1]
            elif part not in ("", "."):
                parts.append(part)
        return ("/" + "/".join(parts) + "/").startswith(prefixes)

    return inside


def _run(code: str, function: str | None, arguments: list, nowhere: int) -> None:
    names: dict[str, Any] = {"__name__": "__main__" if function is None else "answer"}
    # Tests by function name come from sites that import these names for the solver, and answers annotate with List.
    exec("from typing import *", names)
    program = compile(code, "answer.py", "exec")
    if function is None:
        exec(program, names)
        return
    # The result has stdout to itself: what the function prints must not be read as part of it.
    result = os.dup(1)
    os.dup2(nowhere, 1)
    exec(program, names)
    called_function = names.get(function) or getattr(names["Solution"](), function)
    os.write(result, json.dumps(called_function(*arguments)).encode())


if __name__ == "__main__":
    main()
