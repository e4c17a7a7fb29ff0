"""vLLM's server of a model, started by ``rltrain serve``."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.clock import eventually

# The start of vLLM on a busy machine.
START_S = 600


@contextmanager
def serving(path: Path, api_key: str = ""):
    """Yield the address of a server of the model in ``path`` in float32 on the CPU; then stop it by Ctrl-C."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = [f"model={path}", "served_model_name=m", f"port={port}", "dtype=float32", "max_num_seqs=8"]
    command = [sys.executable, "-m", "rltrain.serve", *settings, "gpu_memory_utilization=0.3"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "RLTRAIN_API_KEY": api_key}
    root = f"http://127.0.0.1:{port}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, start_new_session=True, **quiet) as program:
        try:
            eventually(lambda: program.poll() is not None or is_healthy(root), "the server", START_S)
            assert is_healthy(root), "the server did not start"
            yield f"{root}/v1"
            program.send_signal(signal.SIGINT)
            assert program.wait(60) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # with the engine's processes


def is_healthy(root: str) -> bool:
    try:
        return httpx.get(f"{root}/health").is_success
    except httpx.TransportError:
        return False
