"""Runs one program that a model wrote: a script for a fresh interpreter (``python -I -S jail.py DESCRIPTOR``).

The kernel isolates the program: resource limits, then namespaces with a small file system, Landlock and a seccomp
filter, each if the kernel supports it. An audit hook then refuses sockets, processes and files outside the working
directory with messages that name the event. The hook is not a security boundary, because the program shares its
interpreter. Imports nothing of rltrain.
"""

import json
import os
import platform
import resource
import signal
import stat
import struct
import sys
from contextlib import suppress
from typing import Any

MAX_FILE_BYTES = 8 << 20
_MAX_THREADS = 64  # of a program
_USER = 0x10000000
_NAMESPACES = 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000  # process ids, network, IPC, mounts
_PRIVATE, _BIND, _REMOUNT, _READ_ONLY, _NO_SUID, _NO_DEVICES, _DETACH = 1 << 18 | 1 << 14, 4096, 32, 1, 2, 4, 2
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 1, 22, 38, 24

# Files that the dynamic loader reads without an audit event, for extension modules of the standard library.
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/urandom")
# Rights of Landlock. In the working directory, files and folders can be read, written, created and removed, but no
# device, socket, FIFO or symbolic link can be created.
_LANDLOCK_CREATE, _LANDLOCK_RULE, _LANDLOCK_RESTRICT = 444, 445, 446  # on every architecture
_READ_FILE, _READ_FOLDER, _WRITE_NULL = 1 << 2, 1 << 3, 1 << 1 | 1 << 2
_WORK = sum(1 << bit for bit in (1, 2, 3, 4, 5, 7, 8, 13, 14))
# System calls that the filter refuses: name, number on x86_64, number on aarch64. Landlock does not cover processes,
# signals (before ABI 6), modes, times and attributes of files, or sockets.
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "denied_calls.txt"), encoding="utf-8") as _file:
    _DENIED = _file.read()
# System calls refused by an argument: the 32-bit word at ``word`` of the arguments, masked, must (not) be equal.
_CONDITIONS = (
    *(("clone", 56, 220, 0, 0x10000, 0, True),),  # without CLONE_THREAD
    *(("open", 2, -1, 2, 0o1003, 0o1000, True), ("openat", 257, 56, 4, 0o1003, 0o1000, True)),  # truncates when read
    # Signals by SETOWN, SETSIG, SETOWN_EX; leases.
    *(("fcntl", 72, 25, 2, -1, command, True) for command in (8, 10, 15, 1024)),
    # FIOSETOWN, SIOCSPGRP, TIOCSTI; attributes of files (two forms of SETFLAGS, FSSETXATTR, ENABLE_VERITY).
    *(
        ("ioctl", 16, 29, 2, -1, command, True)
        for command in (0x8901, 0x8902, 0x5412, 0x40086602, 0x40046602, 0x401C5820, 0x40806685)
    ),
    ("prctl", 157, 167, 0, -1, _PR_SET_PDEATHSIG, True),
    *(("prlimit64", 302, 261, word, -1, 0, False) for word in (4, 5)),  # new limits
)
_NO_SUCH_CALL = ((435, 435), (437, 437))  # clone3, for which glibc falls back to clone; openat2

_REFUSED = (
    *("socket.", "subprocess.", "ctypes.", "resource.", "pty.", "syslog.", "shutil.", "os.exec", "os.posix_spawn"),
    *("os.spawn", "os.system", "os.fork", "os.kill", "os.link", "os.symlink", "os.chmod", "os.chown", "os.chflags"),
    *("os.lchflags", "os.chdir", "os.chroot", "os.setxattr", "os.removexattr", "signal.pthread_kill", "sqlite3."),
    *("os.getxattr", "os.listxattr", "gc.get_objects", "gc.get_refer", "sys._current_"),
)
_REFUSED_IMPORTS = (
    *("ctypes", "_ctypes", "_posixsubprocess", "_testcapi", "_xxsubinterpreters", "_interpreters", "_posixshmem"),
    *("_multiprocessing", "_testinternalcapi"),
)
_WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.utime")
_REMOVED = ("mkfifo", "mknod", "pidfd_open", "setns", "unshare")  # not covered by audit events
_READS = ("os.listdir", "os.scandir")


def main() -> None:
    """Read the job from the descriptor, isolate this process, run the program. Its result goes to stdout as JSON.

    The active layers are written back to the descriptor, which is closed before the program starts.
    """
    with os.fdopen(int(sys.argv[1]), "r+", encoding="utf-8") as stream:
        job = json.load(stream)
        folder = os.path.realpath(os.getcwd())
        _limit(job["seconds"], job["memory_mb"])
        # Opened now, because later nothing outside the folder can be written.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        layers = isolate(folder, job["root"], job["parent"])
        stream.seek(0)
        stream.truncate()
        json.dump(layers, stream)
    if not (layers["namespaces"] or layers["landlock"] or job["allow_unsandboxed"]):
        return
    # Importing a module in sys.modules raises no audit event.
    sys.modules.pop("ctypes", None)
    sys.modules.pop("_ctypes", None)
    for name in _REMOVED:
        sys.modules["posix"].__dict__.pop(name, None)
        os.__dict__.pop(name, None)
    sys.argv = ["answer.py"]
    library = os.path.dirname(os.path.realpath(os.__file__))
    sys.addaudithook(_doorkeeper(folder, library))
    _run(job["code"], job["function"], job["arguments"], nowhere)


def isolate(folder: str, root: str, parent: int) -> dict[str, int]:
    """Apply every layer that the kernel supports. Return for each whether it is active; for Landlock its ABI."""
    if not sys.platform.startswith("linux"):
        return {"namespaces": 0, "landlock": 0, "seccomp": 0}
    _die_with(parent)
    namespaces = separate(folder, root)
    abi = landlock(folder)
    drop_capabilities()
    return {"namespaces": int(namespaces), "landlock": abi, "seccomp": int(seccomp())}


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
    """Return the number of a user's processes and threads, because the kernel's limit is on all of them."""
    tasks = 0
    with suppress(OSError):  # systems without /proc
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # it has ended meanwhile
                if os.stat(f"/proc/{name}").st_uid == user:
                    tasks += len(os.listdir(f"/proc/{name}/task"))
    return tasks


def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """Call the kernel by number, because the C library has no function for it."""
    import ctypes

    return _libc().syscall(
        *(ctypes.c_long(each) if isinstance(each, int) else each for each in (number, *arguments)),
    )


def _die_with(parent: int) -> None:
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before prctl took effect, in which case no signal is sent
        os._exit(1)


def separate(folder: str, root: str) -> bool:
    """Continue as the first process of new namespaces, without network or other processes. The file system contains
    only ``folder``, Python's library and system libraries, and is built in the empty folder ``root``. Return True if
    all of it is active. The kernel may allow namespaces but refuse mounts.
    """
    libc, user, group = _libc(), os.getuid(), os.getgid()
    if libc.unshare(_NAMESPACES | _USER) == 0:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with suppress(OSError), open(f"/proc/self/{name}", "w", encoding="utf-8") as stream:
                stream.write(line)
    elif user != 0 or libc.unshare(_NAMESPACES) != 0:  # containers may forbid user namespaces only
        return False
    # A new process-id namespace holds only children, so a child continues and this process passes its exit code on.
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        _mount(None, "/", _PRIVATE)
        _mount("jail", root, _NO_SUID | _NO_DEVICES, "tmpfs", "size=1m,mode=755")
        for path in sorted({*_library(), *filter(os.path.exists, (*_SYSTEM, *_DEVICES))}):
            _bind(path, root, read_only=True)
        _bind(folder, root, read_only=False)
        _mount(None, root, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
        os.chdir(root)
    except OSError:
        return False
    # The old root is mounted under the new one, at the same place, and is detached from there.
    if libc.pivot_root(b".", b"."):
        os.chdir(folder)
        return False
    if libc.umount2(b".", _DETACH):
        os._exit(1)
    os.chdir(folder)
    return True


def _library() -> set[str]:
    """Return the folders of the standard library, with and without symbolic links resolved."""
    folders = {path for path in sys.path if os.path.isdir(path)}
    return folders | set(map(os.path.realpath, folders))


def _bind(path: str, root: str, *, read_only: bool) -> None:
    place = root + path
    if read_only and os.path.exists(place):  # inside a folder that is already mounted
        return
    os.makedirs(place if os.path.isdir(path) else os.path.dirname(place), exist_ok=True)
    if not os.path.isdir(path):
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
    _mount(path, place, _BIND)
    if read_only and path not in _DEVICES:
        # A user namespace must keep the flags of the mount; apart from relatime they equal the flags of statvfs.
        _mount(None, place, _REMOUNT | _BIND | _READ_ONLY | os.statvfs(place).f_flag & 0xC0F)


def _mount(source: str | None, target: str, flags: int, kind: str | None = None, data: str | None = None) -> None:
    import ctypes

    source_, target_, kind_, data_ = (text and text.encode() for text in (source, target, kind, data))
    if _libc().mount(source_, target_, kind_, ctypes.c_ulong(flags), data_):
        raise OSError(ctypes.get_errno(), f"mount of {target}")


def landlock(folder: str) -> int:
    """Allow access to files in ``folder``, and reading Python's and the system's libraries. Return the ABI, or 0."""
    _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if (abi := _call(_LANDLOCK_CREATE, None, 0, 1)) <= 0:
        return 0
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    # TCP since ABI 4; abstract sockets and signals since ABI 6.
    handled = struct.pack("QQQ", files, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _call(_LANDLOCK_CREATE, handled, len(handled), 0)
    rights = dict.fromkeys(_SYSTEM, _READ_FILE) | dict.fromkeys(_library(), _READ_FILE | _READ_FOLDER)
    for path, right in (rights | {"/dev/null": _WRITE_NULL, "/dev/urandom": _READ_FILE, folder: _WORK}).items():
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_PATH)
            _call(_LANDLOCK_RULE, rules, 1, struct.pack("=Qi", right & files, descriptor), 0)
            os.close(descriptor)
    failed = _call(_LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)
    return 0 if failed else abi


def drop_capabilities() -> None:
    """Drop all capabilities, also those within a user namespace, and the means to regain them."""
    libc = _libc()
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for number in range(64):
        libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))


def seccomp(denied_calls: str = _DENIED, conditions: tuple = _CONDITIONS) -> bool:
    """Refuse new processes, signals to other processes, sockets and the rest of `_DENIED`. Return True if active."""
    import ctypes

    machine = platform.machine()
    column, architecture = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}.get(machine, (0, 0))
    if not architecture or sys.byteorder != "little":
        return False
    words = denied_calls.split()
    denied = [int(word) for word in words[1 + column :: 3] if word != "-"]
    load, equal, at_least, give, mask = 0x20, 0x15, 0x35, 0x06, 0x54
    refuse = (give, 0, 0, 0x50000 | 1)  # EPERM
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, 0x80000000), (load, 0, 0, 0)]
    if column == 0:  # system call numbers of the x32 interface
        program += [(at_least, 0, 1, 0x40000000), refuse]
    for call in _NO_SUCH_CALL:
        program += [(equal, 0, 1, call[column]), (give, 0, 0, 0x50000 | 38)]
    own_process = ("tgkill", 234, 131, 0, -1, os.getpid(), False)
    for _, x86, arm, word, bits, value, refused_if_equal in (*conditions, own_process):
        if (number := (x86, arm)[column]) >= 0:
            jumps = (0, 1) if refused_if_equal else (1, 0)
            program += [(equal, 0, 5, number), (load, 0, 0, 16 + 4 * word), (mask, 0, 0, bits & 0xFFFFFFFF)]
            program += [(equal, *jumps, value), refuse, (load, 0, 0, 0)]
    program += [(equal, len(denied) - index, 0, number) for index, number in enumerate(denied)]
    program += [(give, 0, 0, 0x7FFF0000), refuse]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    filter_ = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    libc = _libc()
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return libc.prctl(_PR_SET_SECCOMP, 2, filter_, 0, 0) == 0


def _doorkeeper(folder: str, library: str) -> Any:
    """Return the audit hook. Its names are bound here, so that a program cannot replace its functions or builtins."""
    refused, imports, writes, reads, error = _REFUSED, _REFUSED_IMPORTS, _WRITES, _READS, PermissionError
    write_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    may_write = _inside(folder, (folder,))
    may_read = _inside(folder, (folder, library, *_DEVICES))
    kind, text, look, is_folder = type, str, os.stat, stat.S_ISDIR

    def may_import(name: Any, file: Any) -> bool:
        # A loader can give the file the name of any package, and a copied file may have any name.
        if kind(name) is not text or kind(file) not in (text, kind(None)):
            return False
        stem = text.split(text.split(file or name, "/")[-1], ".")[0]
        return text.split(name, ".")[-1] not in imports and stem not in imports

    def hook(event: str, arguments: tuple) -> None:
        allowed = True
        if event == "open":
            path = arguments[0]
            allowed = (may_write if arguments[2] & write_flags else may_read)(path)
            if allowed and arguments[1] is None:  # os.open: the event does not include dir_fd
                with suppress(OSError, ValueError):
                    allowed = not is_folder(look(path).st_mode)
        elif event == "import":
            allowed = may_import(arguments[0], arguments[1])
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
    # Paths are compared as text, without os.path, which the program may have replaced. Text is enough, because the
    # program cannot create links.
    kind, text, number, raw, prefixes = type, str, int, bytes, tuple(root + "/" for root in roots)

    def inside(path: Any) -> bool:
        if path is None or kind(path) is number:  # the working directory; a file that is already open
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
    # Tests that call a function by name are from sites that import these names for the solver, so responses use List in
    # annotations.
    exec("from typing import *", names)
    program = compile(code, "answer.py", "exec")
    if function is None:
        exec(program, names)
        return
    # The result uses stdout exclusively: the function's prints must not be read as part of it.
    result = os.dup(1)
    os.dup2(nowhere, 1)
    exec(program, names)
    called_function = names.get(function) or getattr(names["Solution"](), function)
    os.write(result, json.dumps(called_function(*arguments)).encode())


if __name__ == "__main__":
    main()
