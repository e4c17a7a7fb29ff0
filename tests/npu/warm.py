"""A process with the stand-in device and imported packages, from which single checks are forked."""

import importlib
import json
import os
import sys
import traceback

import torch_npu  # noqa: F401 - installs the device

import rltrain.workers.hybrid  # noqa: F401
import tests.local  # noqa: F401
import tests.tiny_vision  # noqa: F401


def check(module: str, function: str, arguments: list[str], output: str) -> int:
    opened = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(opened, stream)
    try:
        getattr(importlib.import_module(module), function)(*arguments)
    except BaseException:  # noqa: BLE001 - whatever it is
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            code = check(*json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
