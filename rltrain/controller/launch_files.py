"""The files of a launch: where the head leaves its address for the other nodes, and Ray's token."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from rltrain.controller.nodes import answers
from rltrain.env import first_set, use_token
from rltrain.errors import ConfigError

# Below the user's home; Ray looks there.
_OWN_TOKEN = ".ray/auth_token"


def offer_token(file: Path | None) -> None:
    """Clear what an earlier head has left, make a token where there is none, and lay it beside the file."""
    said = text(file)
    if said and answers(said):
        raise ConfigError(
            f"{file} names {said}, where another head answers. Stop that one, or set HEAD_FILE to another file."
        )
    own = Path.home() / _OWN_TOKEN
    token = first_set("RAY_AUTH_TOKEN") or text(Path(first_set("RAY_AUTH_TOKEN_PATH") or own))
    if not token:
        token = secrets.token_hex(32)
        write(own, token)
    if file:
        file.unlink(missing_ok=True)
        write(beside(file), token)


def take_token(file: Path | None) -> bool:
    """Use the token beside the head's file, else this user's; whether there is one."""
    if token := text(beside(file)) if file else "":
        use_token(token)
    return bool(token or text(Path.home() / _OWN_TOKEN))


def beside(file: Path) -> Path:
    """Where the token of the head is whose address stands in the file."""
    return file.with_name(f"{file.name}.token")


def text(file: Path | None) -> str:
    """What stands in a file; empty where there is none."""
    with suppress(OSError):
        return file.read_text().strip() if file else ""
    return ""


def write(file: Path, content: str) -> None:
    """Whole or not at all, and readable for this user alone."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
        opened.write(f"{content}\n")
    draft.replace(file)
