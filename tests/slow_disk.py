"""A file system whose storage is slow, or does not respond for a while. Only root can create one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Of the first version of control groups, which limits whoever writes to a device, the kernel's own threads included.
_LIMIT = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")


class SlowDisk:
    """ext4 in a file, behind a loop device, mounted at ``path``."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self._device = path, device
        self._frozen: subprocess.Popen | None = None

    def limit(self, bytes_per_s: int) -> None:
        """Limit writing to so many bytes per second from now on; 0: no limit. Raises OSError if the kernel has no such
        limits."""
        numbers = Path(f"/sys/block/{Path(self._device).name}/dev").read_text().strip()
        _LIMIT.write_text(f"{numbers} {bytes_per_s}")

    def freeze(self) -> None:
        """Block all writers from now on, even for signals, until `thaw` or the end of this process."""
        command = 'fsfreeze -f "$0" && echo frozen; read line; fsfreeze -u "$0"'
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._frozen = subprocess.Popen(["bash", "-c", command, str(self.path)], start_new_session=True, **pipes)
        assert self._frozen.stdout.readline() == "frozen\n"

    def thaw(self) -> None:
        if self._frozen:
            self._frozen.communicate("thaw\n")
            self._frozen = None


@contextmanager
def slow_disk(folder: Path, mib: int) -> Iterator[SlowDisk]:
    """Yield a disk of ``mib`` MiB at ``folder``/disk. Raises OSError if it cannot be created."""
    file, path = folder / "disk.ext4", folder / "disk"
    path.mkdir()
    with open(file, "wb") as made:
        os.truncate(made.fileno(), mib << 20)
    _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(file))
    device = _run("losetup", "--find", "--show", "--direct-io=on", str(file)).strip()
    try:
        _run("mount", device, str(path))
    finally:
        _run("losetup", "--detach", device)  # once nothing is mounted from it
    disk = SlowDisk(path, device)
    try:
        yield disk
    finally:
        disk.thaw()
        if _LIMIT.exists():
            disk.limit(0)
        _run("umount", "-l", str(path))  # what still writes keeps it, until that has ended


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise OSError(error.returncode, f"{' '.join(command)}: {error.stderr.strip()}") from error
