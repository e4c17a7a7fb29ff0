"""The first process of a host: creates its file systems, then adopts orphans until its input ends or it is killed."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main(name: str, own: Path, visible: list[Path]) -> None:
    socket.sethostname(name)
    # Many a system says in /etc/hosts that its own name is 127.0.1.1. No name server answers, and none is waited for.
    files = {
        "/etc/hosts": f"127.0.0.1 localhost\n127.0.1.1 {name}\n",
        "/etc/hostname": f"{name}\n",
        "/etc/resolv.conf": "",
    }
    for path, text in files.items():
        if os.path.exists(path):
            (own / Path(path).name).write_text(text)
            mount("--bind", str(own / Path(path).name), path)
    mount("-t", "sysfs", "sysfs", "/sys")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    for folder in visible:
        inside = own / folder.relative_to("/")
        inside.mkdir(parents=True, exist_ok=True)
        mount("--bind", str(folder), str(inside))
    mount("--rbind", str(own / "tmp"), "/tmp")
    # So that every end of a child wakes the loop.
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(ended, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([0, ended], [], [])
        if 0 in ready:
            return
        os.read(ended, 4096)
        while _reap():
            pass


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [Path(each) for each in sys.argv[3:]])
