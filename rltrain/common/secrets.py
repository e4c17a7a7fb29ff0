"""Detection of secrets, and masking of their values in files, logs, trackers and archives.

A value is a secret by the name of its key, by its position in a URL (``user:password@``, ``?sig=``), or as a bearer
token. Numbers are masked too, except under plurals such as ``max_tokens``, which are lengths.
"""

import re
from typing import Any

MASK = "***"
# "key", "token" and the like count only as the last word: key_name, monkey and max_token_len are not secrets.
_SECRET = re.compile(
    r"pass(word|wd|phrase|code)|secret|credential|bearer|api[-_]?key(?!_env$)|authorization|cookie"
    r"|(^|[-_.])(keys?|tokens?|(key|token|pat|sig|signature|auth|pwd|pass|dsn|jwt|sas)"
    r"([-_](prod|production|dev|test|staging|live|old|new|main|backup|\d+))?)$|(?-i:[a-z](Key|Token|Auth)$)"
    # Variables with a suffix after KEY, TOKEN and so on, unless the suffix (_NAME, _FILE, …) shows that the value is
    # not the secret itself.
    r"|(?-i:(^|_)(KEY|TOKEN|PAT|DSN|JWT|PASS)_(?!([A-Z0-9_]+_)?(NAME|FILE|PATH|DIR|ENV|ID|LEN|LENGTH|LIMIT|SIZE|COUNT"
    r"|BYTES|MODE|TYPE|TTL|RATE)$)[A-Z0-9_]+$)",
    re.IGNORECASE,
)
# Names that are not secrets: columns and keys of data files, special tokens of a tokenizer, and numbers of tokens.
_COLUMNS = re.compile(
    r"(prompt|image|images|video|videos|audio|reward_fn|reward|answer|response|label|input|output|messages|group|sort"
    r"|own|tools|gdpo_reward|chosen|rejected)_keys?|(pad|eos|bos|unk|sep|cls|mask|image|video|audio)_tokens?"
    r"|(\w+_)?(max|min|num|draft|new)(_\w+)?_tokens",
    re.IGNORECASE,
)
# Variables that end like a password's name but contain a folder.
_FOLDERS = ("PWD", "OLDPWD")
# A password may contain "/" and "@" if the URL has a scheme. The length bounds keep the search linear.
_CREDENTIALS = re.compile(
    r"(?<=://)(?:[^/@\s\"':]{0,999}:[^\s\"']{0,999}|[^/@\s\"']{1,999})@"
    r"|(?<![\w/.%+@:-])[\w.%+-]{1,99}:[^\s\"'@/]{1,999}@(?=\w)"
)
_SCHEME = r"(?:(?:bearer|basic|token|digest|api-?key)[ \t]+)?"
# A name and its value, as in URLs, headers, shells, YAML and JSON. A reference to a variable is not a value.
_NAME = re.compile(r"(?<![\w.%-])([\w.%-]+)([\"']?[ \t]{0,2}[:=][ \t]{0,2})(?![\"']?[$…])")
_VALUE = re.compile(
    rf"\"{_SCHEME}(?:[^\"\\\n]|\\.)*\"|'{_SCHEME}[^'\n]*'|{_SCHEME}[^\s&;,#\"'=\[{{(][^\s&;,#\"']*", re.IGNORECASE
)
_FLAG = re.compile(r"--([\w-]+)[ \t]+(?=[^\s$-])(\"[^\"\n]*\"|'[^'\n]*'|\S+)")
# Words that occur in ordinary text before a colon.
_WORDS = re.compile(r"keys?|tokens?|secrets?|auth|pass|sig|signature", re.IGNORECASE)
_NUMBER = re.compile(r"[\d.,_eE+-]+")
_BEARER = re.compile(r"\b(bearer|basic)[ \t]+[\w.~+/=-]{8,}", re.IGNORECASE)
# Known prefixes of tokens.
_TOKEN = re.compile(r"\b(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AIza|AKIA)[\w-]{16,}")
# Header lines: any scheme and several cookies may come before the secret.
_LINE = re.compile(r"\b((?:authorization|cookie):[ \t]*)(?![ \t\"'])(?![^\n\"'}]*\$)[^\n\"'}]+", re.IGNORECASE)
_HEADER = re.compile(r"[\"']?([\w-]+)[\"']?[ \t]*:[ \t]*(?!\$\{oc\.env:)(\S.*)", re.DOTALL)
_LONE = re.compile(r"(token|digest|api-?key) +\S{8,}", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{oc\.env:[^{}]*\}")


def is_secret(name: str, value: object = "") -> bool:
    """Return whether the value of a key with this name, or below it, is a secret.

    A number is not a secret if the name ends in "tokens" or "keys", because it is a count.
    """

    def is_named(part: str) -> bool:
        is_length = part.lower().endswith(("tokens", "keys")) and _NUMBER.fullmatch(str(value))
        return bool(_SECRET.search(part)) and not _COLUMNS.fullmatch(part) and not is_length

    return name not in _FOLDERS and any(map(is_named, name.split(".")))


def masked(value: Any, name: str = "") -> Any:
    """Return a configuration value, of any depth, without its secrets. name: the key's name."""
    # Any header may contain a token, whatever its name.
    secret = is_secret(name) or name == "url_headers"
    if isinstance(value, dict):
        # A header or variable given as a mapping, in which the name is a value: {name: TOKEN, value: …}.
        names = (str(item) for key, item in value.items() if str(key).lower() in ("name", "key", "header"))
        inside = ("value", "val", "content", "default") if any(map(is_secret, names)) else ()
        return {
            key: masked(item, "secret" if secret or str(key).lower() in inside else str(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        first = value[0] if len(value) == 2 and isinstance(value[0], str) else ""
        is_pair = is_secret(first) and not _WORDS.fullmatch(first)
        return [masked(item, "secret" if is_pair and place else name) for place, item in enumerate(value)]
    if isinstance(value, str):
        if _REFERENCE.fullmatch(value):  # names the variable with the secret
            return value
        if value and (secret or _LONE.fullmatch(value)):
            return MASK
        header = _HEADER.fullmatch(value)
        return f"{header[1]}: {MASK}" if header and is_secret(header[1], header[2]) else masked_text(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return MASK if is_number and (name == "secret" or is_secret(name, value)) else value


def masked_text(text: str) -> str:
    """Return text without the secrets in its URLs, headers and ``name=value`` pairs."""
    text = _LINE.sub(rf"\1{MASK}", _CREDENTIALS.sub(f"{MASK}@", text))
    text = _FLAG.sub(lambda flag: f"--{flag[1]} {MASK}" if is_secret(*flag.groups()) else flag[0], text)
    parts, end = [], 0
    for pair in _NAME.finditer(text):
        name, between = pair.groups()
        if pair.start() < end or not is_secret(name):
            continue
        before, first = text[max(pair.start() - 1, 0) : pair.start()], text[pair.end() : pair.end() + 1]
        # "KEY=VALUE" in a usage text is not a secret, but "?key=" in a URL and key="…" are.
        if name.lower() in ("key", "keys") and before not in ("?", "&") and first not in ("'", '"'):
            continue
        # A statement in a traceback has spaces, a metric's name has a slash, and a key of the configuration has a dot.
        is_prose = ":" in between and ("." in name or before == "/")
        if is_prose or ((":" in between or between == " = ") and _WORDS.fullmatch(name)):
            continue
        if (match := _VALUE.match(text, pair.end())) and is_secret(name, value := match[0].strip("\"'")):
            parts += [text[end : match.start()], match[0].replace(value, MASK, 1) if value else match[0]]
            end = match.end()
    return _TOKEN.sub(MASK, _BEARER.sub(rf"\1 {MASK}", "".join(parts) + text[end:]))
