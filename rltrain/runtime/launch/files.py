"""Files of a launch: the head's address for the other nodes, and Ray's token."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from rltrain.common.env import first_set, use_token
from rltrain.common.errors import ConfigError
from rltrain.runtime.launch.store import accepts_connections

# Below the user's home, where Ray expects it.
_OWN_TOKEN = ".ray/auth_token"


def head_token(file: Path | None) -> str:
    """Return the head's token, created if missing. Removes files of an earlier head."""
    address = text(file)
    if address and accepts_connections(address):
        raise ConfigError(
            f"{file} contains {address}, where another head is running. Stop it, or set another HEAD_FILE."
        )
    path = Path.home() / _OWN_TOKEN
    if file:
        file.unlink(missing_ok=True)
        token_file(file).unlink(missing_ok=True)
    if token := first_set("RAY_AUTH_TOKEN"):
        return token
    if named := first_set("RAY_AUTH_TOKEN_PATH"):
        return _token_of(Path(named), "RAY_AUTH_TOKEN_PATH points to it")
    path.parent.mkdir(parents=True, exist_ok=True)
    # An existing token, even an unreadable one, may be used by other clusters of this user.
    exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with suppress(FileExistsError), open(os.open(path, exclusive, 0o600), "w", encoding="utf-8") as opened:
        opened.write(f"{secrets.token_hex(32)}\n")
    with suppress(OSError):
        path.chmod(0o600)  # Ray's command creates it with the umask's mode
    return _token_of(path, "remove it, and a new one is created")


def publish(file: Path, address: str, token: str) -> None:
    """Publish the head's address for the other nodes, after the token."""
    write(token_file(file), token)
    write(file, address)


def unpublish(file: Path, address: str) -> None:
    """Remove the address, unless another head has replaced it."""
    if text(file) == address:
        file.unlink(missing_ok=True)
        token_file(file).unlink(missing_ok=True)


def token_variable() -> str:
    """Return the variable that sets this node's token; empty if none does."""
    named = [name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if first_set(name)]
    return named[0] if named else "" if first_set("RAY_AUTH_MODE") == "token" else "no RAY_AUTH_MODE=token"


def use_head_token(file: Path | None) -> Path | None:
    """Use the token next to the head's file, or else this user's. Returns its file; None if there is none."""
    if file and (token := text(token_file(file))):
        use_token(token)
        return token_file(file)
    path = Path.home() / _OWN_TOKEN
    return path if text(path) else None


def token_file(file: Path) -> Path:
    """Return the file of the token that belongs to the address file."""
    return file.with_name(f"{file.name}.token")


def text(file: Path | None) -> str:
    """Return the content of a file; empty if missing. Raises ConfigError if it belongs to another user."""
    with suppress(OSError):
        # With root squashing (NFS), root's files appear to belong to another user.
        if file and os.geteuid() and file.stat().st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{file} belongs to another user. Remove it, or set HEAD_FILE to a different file.")
        return file.read_text("utf-8").strip() if file else ""
    return ""


def _token_of(file: Path, fix: str) -> str:
    try:
        token = file.read_text("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"the token in {file} cannot be read ({error.strerror}): {fix}.") from error
    if not token:
        raise ConfigError(f"{file} has no token: {fix}.")
    return token


def write(file: Path, content: str) -> None:
    """Write atomically, readable by this user only."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
    with open(handle, "w", encoding="utf-8") as opened:
        opened.write(f"{content}\n")
    Path(draft).replace(file)
