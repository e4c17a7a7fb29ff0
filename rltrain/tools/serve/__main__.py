"""``python -m rltrain.serve model=PATH [KEY=VALUE ...] [-- WORDS OF VLLM]``: an OpenAI-compatible server of a model."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rltrain.base.env import first_set, installed
from rltrain.base.errors import CheckpointError, ConfigError, DataError, command
from rltrain.config.schema.conditions import as_text
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import texts_of
from rltrain.tools.serve.settings import ServeSettings, read_settings

if TYPE_CHECKING:
    from rltrain.data.chat import ChatEncoder

API_KEY = "RLTRAIN_API_KEY"
# In the place of a template that a model has not.
_NO_TEMPLATE = (
    "{{ raise_exception('the model has no chat template: ask /v1/completions, or start the server with "
    "chat_template=FILE') }}"
)


def _parser() -> argparse.ArgumentParser:
    texts = texts_of(ServeSettings)
    keys = "".join(
        f"  {entry.name}={as_text(entry.default)}\n      {texts[entry.name]}\n" for entry in fields(ServeSettings)
    )
    parser = argparse.ArgumentParser(
        description="Serve a model as OpenAI's servers do: /v1/chat/completions, /v1/completions, /v1/models, /health.",
        epilog=f"keys, with their defaults:\n{keys}\n{API_KEY}: requests must have this key, if the variable is set.\n"
        "Words behind -- go to vllm serve as they are.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help="model=PATH, and the keys below")
    parser.add_argument(
        "--engine", choices=("vllm", "hf"), default="vllm" if installed("vllm") else "hf",
        help="vllm: its own server; hf: the embedded engine, on any device (default: vllm where it is installed)",
    )  # fmt: skip
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    of_vllm = words[words.index("--") + 1 :] if "--" in words else []
    arguments = _parser().parse_intermixed_args(words[: words.index("--")] if "--" in words else words)
    settings = read_settings(arguments.words)
    # Imported here, so that --help need not wait for torch.
    from rltrain.run.checkpoints.model_folder import find_model

    found = find_model(settings.model, "model")
    if found.is_adapter:
        raise CheckpointError(
            f"model={settings.model} is an adapter. Serve the exported model of its run (global_step_N), into which "
            "the adapter is merged."
        )
    if arguments.engine == "vllm":
        return _with_vllm(settings, found.path, of_vllm)
    if of_vllm:
        raise ConfigError(f"{' '.join(of_vllm)}: words behind -- are for vllm serve. Leave them out with --engine hf.")
    try:
        return _here(settings, found.path)
    except KeyboardInterrupt:  # before it serves: from there on a signal is heard by the server
        return 130


def _with_vllm(settings: ServeSettings, path: str, more: Sequence[str]) -> int:
    from rltrain.tools.serve.server import listener_of
    from rltrain.tools.serve.vllm import become_vllm, vllm_arguments

    if not installed("vllm"):
        raise ConfigError(f"--engine vllm: vLLM is not installed ({ENGINES['vllm'].install}). Use --engine hf.")
    with listener_of(settings) as listener:
        port = listener.getsockname()[1]
    become_vllm(vllm_arguments(settings, path, port, more), first_set(API_KEY))
    raise AssertionError("the process is another one")


def _here(settings: ServeSettings, path: str) -> int:
    from rltrain.tools.serve.answers import AnswerQueue
    from rltrain.tools.serve.engine import load_engine
    from rltrain.tools.serve.server import Server, listener_of, serve_until_signal

    api_key = first_set(API_KEY)
    with listener_of(settings) as listener:
        reading, drawing = (words_of(settings, path) for _ in range(2))
        queue = AnswerQueue()
        engine = load_engine(settings, path, drawing, queue)
        server = Server(settings.name, reading, queue, engine.longest, api_key)
        host, port = listener.getsockname()[:2]
        if not api_key and not host.startswith(("127.", "::1")):
            sys.stderr.write(f"note: whoever reaches host={host} may ask: {API_KEY} is not set.\n")
        sys.stdout.write(
            f"serving {settings.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1, {engine.most_rows} "
            f"answers of up to {engine.longest} tokens at once (Ctrl-C ends it)\n"
        )
        sys.stdout.flush()
        asyncio.run(serve_until_signal(server, listener, engine, queue))
    sys.stdout.write("ended\n")
    return 0


def words_of(settings: ServeSettings, path: str) -> ChatEncoder:
    """A tokenizer for one thread. Raises DataError where there is none."""
    from rltrain.data.chat import ChatEncoder

    def words(template: str | None) -> ChatEncoder:
        return ChatEncoder(
            path, settings.trust_remote_code, template, min_pixels=settings.min_pixels, max_pixels=settings.max_pixels
        )

    encoder = words(settings.chat_template)
    try:
        _ = encoder.tokenizer
    except DataError:
        if settings.chat_template:
            raise
        # A base model has no template, and answers completions all the same; without a tokenizer this raises again.
        encoder = words(_NO_TEMPLATE)
        _ = encoder.tokenizer
    return encoder


if __name__ == "__main__":
    sys.exit(main())
