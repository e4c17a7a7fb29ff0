"""Python imports this module at the start of each process of a run. It sets the trap. A worker of Ray asks the nursery
for a process that has imported the packages, and stands in for it until it has ended: as raylet's child, with its exit
code.
"""

import os
import sys

_words = sys.orig_argv[1:]
# Processes of Ray that run none of our code.
_RAYS = ("/ray/dashboard/", "/ray/autoscaler/", "/log_monitor.py", "/runtime_env/agent/")


def _be_born(nursery: str) -> None:
    import json
    import signal
    import socket

    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + nursery)
        socket.send_fds(line, [b" "], [0, 1, 2])
        asked = json.dumps([os.getpid(), os.getcwd(), _words, dict(os.environ)])
        line.sendall(f"{asked}\n".encode())
        code = int(line.makefile().read() or -signal.SIGKILL)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


if "RLTRAIN_NURSERY" in os.environ and any(word.endswith("/default_worker.py") for word in _words[:1]):
    _be_born(os.environ["RLTRAIN_NURSERY"])
elif "RLTRAIN_TRAP" in os.environ and not any(each in word for each in _RAYS for word in _words):
    from tests.faults.trapping import lay

    lay()
