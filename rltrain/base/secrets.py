"""Names of secrets, and text without their values: for files, logs, trackers and archives that others read.

A value is a secret by the name of its key, by its position in a URL (``user:password@``, ``?sig=``), or as a bearer
token. Numbers count too, except under plurals such as ``max_tokens``, which are lengths.
"""

import re
from typing import Any

MASK = "***"
# "key", "token" and the like count only as the last word: key_name, monkey and max_token_len are not secrets.
_SECRET = re.compile(
    r"pass(word|wd|phrase|code)|secret|credential|bearer|api[-_]?key(?!_env$)|authorization|cookie"
    r"|(^|[-_.])(keys?|tokens?|pat|sig|signature|auth|pwd|pass|dsn|jwt|sas)$|(?-i:[a-z](Key|Token|Auth)$)",
    re.IGNORECASE,
)
# Names of columns and of keys in data files.
_COLUMNS = re.compile(
    r"(prompt|image|images|video|videos|audio|reward_fn|reward|answer|response|label|input|output|messages|group|sort"
    r"|own|gdpo_reward|chosen|rejected)_keys?",
    re.IGNORECASE,
)
# Variables whose names end like a password's.
_FOLDERS = ("PWD", "OLDPWD")
# A password may contain "/" and "@".
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/@\s\"':]*:[^\s\"']*|[^/@\s\"']+)@")
_PAIR = re.compile(r"(?<![\w.%-])([\w.%-]+)=([^\s&;,#\"'=]+)")
_NUMBER = re.compile(r"[\d.,_eE+-]+")
_BEARER = re.compile(r"\b(bearer|basic) +[\w.~+/=-]{8,}", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{oc\.env:[^{}]*\}")


def is_secret(name: str, value: object = "") -> bool:
    """Return whether the value of a key with this name, or below it, is a secret. Numbers under plurals are not."""

    def is_named(part: str) -> bool:
        is_length = part.lower().endswith(("tokens", "keys")) and _NUMBER.fullmatch(str(value))
        return bool(_SECRET.search(part)) and not _COLUMNS.fullmatch(part) and not is_length

    return name not in _FOLDERS and any(map(is_named, name.split(".")))


def masked(value: Any, name: str = "") -> Any:
    """Return a configuration value, of any depth, without its secrets. name: of its key."""
    # Any header may contain a token, whatever its name.
    secret = is_secret(name) or name == "url_headers"
    if isinstance(value, dict):
        return {key: masked(item, "secret" if secret else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if isinstance(value, str):
        if _REFERENCE.fullmatch(value):  # it names the variable with the secret
            return value
        return MASK if value and secret else masked_text(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return MASK if is_number and (name == "secret" or is_secret(name, value)) else value


def masked_text(text: str) -> str:
    """Return text without the secrets in its URLs and ``name=value`` pairs."""
    text = _CREDENTIALS.sub(f"{MASK}@", text)
    text = _PAIR.sub(lambda pair: f"{pair[1]}={MASK}" if is_secret(*pair.groups()) else pair[0], text)
    return _BEARER.sub(rf"\1 {MASK}", text)
