"""A wire between TAP network cards of the kernel: frames arrive late, and some are lost."""

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import sys
import time

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def card(name: str) -> int:
    """Return the file descriptor of a new TAP card: read returns a frame that was sent through it, write
    delivers one."""
    line = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(line, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return line


def frames(line: int):
    while True:
        try:
            yield os.read(line, 1 << 16)
        except (BlockingIOError, OSError):  # none is left, or the card is still down
            return


def main(names: list[str]) -> None:
    delay_s = loss = 0.0
    lines = [card(name) for name in names]
    draw, number = random.Random(1).random, itertools.count()
    under_way: list[tuple[float, int, int, bytes]] = []
    print("ready", flush=True)
    while True:
        until_next = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([*lines, 0], [], [], until_next)
        if 0 in ready:
            if not (said := sys.stdin.readline()):
                return
            delay_s, loss = float(said.split()[0]) / 1000, float(said.split()[1])
            print("ready", flush=True)
        due = time.monotonic() + delay_s
        for line in set(ready) - {0}:
            for frame in frames(line):
                for other in lines:
                    if other != line and draw() >= loss:
                        heapq.heappush(under_way, (due, next(number), other, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, line, frame = heapq.heappop(under_way)
            try:
                os.write(line, frame)
            except OSError:  # the card is down: the frame is lost
                continue


if __name__ == "__main__":
    main(sys.argv[1:])
