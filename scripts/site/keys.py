"""The page of all keys, generated from the schema, and links to it from every page that names a key."""

import re
from functools import cache

from rltrain.config.schema.conditions import as_text
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import Key, all_keys, sections
from rltrain.config.verl.other_trainers import names_elsewhere

_INTRO = """\
# All keys

Every key of a configuration, with its type, its default and what it means, as `rltrain train --help KEY` prints it.
This page is made of the fields in `rltrain/config/schema/`; names are verl's. A default `${other.key}` is the value of
that key. Words of a command are `key=value`; [how files and words are put together](../README.md#commands).

"""
_PAGE = re.compile(r"\bdocs/([\w-]+\.md)")
_CODE = re.compile(r"<code>(?P<name>[a-z_][\w.]*)(?P<rest>=[^<]*)?</code>")


def keys_page() -> str:
    """Return Markdown: a heading for each section, below it one for each key, whose anchor is its full name."""
    text = _INTRO
    for section, about in sections().items():
        own = [key for key in all_keys().values() if key.name.rpartition(".")[0] == section]
        if own:
            text += f"## `{section}` {{#{section}}}\n\n{_linked(about)}\n\n" + "".join(map(_entry, own))
    return text


def _entry(key: Key) -> str:
    facts = [key.type_name, f"default `{as_text(key.default) or '(empty)'}`"]
    if key.choices:
        facts.append("one of " + ", ".join(f"`{as_text(choice)}`" for choice in key.choices))
    if bounds := key.rules.bounds():
        facts.append(bounds)
    said = [_linked(" ".join(key.help.split()))]
    conditions = [condition for _, condition, _ in key.only_with]
    if conditions:
        said.append("Has an effect only with " + " and ".join(f"`{condition}`" for condition in conditions) + ".")
    if unused := [name for name, engine in ENGINES.items() if key.name.rpartition(".")[2] in engine.unused_keys]:
        said.append("No effect with " + " and ".join(f"`rollout.name={name}`" for name in unused) + ".")
    if others := names_elsewhere(key.name):
        said.append("Other trainers call it " + ", ".join(f"`{name}`" for name in others) + ".")
    return f"#### `{key.name}` {{#{key.name}}}\n\n*{' · '.join(facts)}*\n\n{' '.join(said)}\n\n"


def _linked(text: str) -> str:
    """Return a help text as Markdown: special characters are escaped, names of keys are code, and pages are links."""

    def mark(word: re.Match[str]) -> str:
        if page := _PAGE.fullmatch(word[0]):
            return f"[{page[1]}]({page[1]})"
        name = word[0].partition("=")[0]
        return f"`{word[0]}`" if full_name(name) else re.sub(r"([*_<\[\]{}|])", r"\\\1", word[0])

    return re.sub(r"docs/[\w-]+\.md|[a-z_][\w.]*\w(?:=\w+)?|[*_<\[\]{}|]", mark, text)


def full_name(name: str) -> str | None:
    """Return the full key for a name in a page, or None.

    The name may be full, without the common prefix of the policy's keys, or the end of exactly one key with at least
    two parts.
    """
    if "." not in name:
        return None
    near = [key for key in (name, f"actor_rollout_ref.{name}") if key in all_keys()]
    return near[0] if near else _by_end().get(name)


@cache
def _by_end() -> dict[str, str]:
    """Return the end of a name -> the full name, if no other key has that end."""
    ends: dict[str, set[str]] = {}
    for name in all_keys():
        words = name.split(".")
        for first in range(len(words)):
            ends.setdefault(".".join(words[first:]), set()).add(name)
    return {end: next(iter(names)) for end, names in ends.items() if len(names) == 1}


def breakable(page: str) -> str:
    """Return HTML in which long words of code may break after their dots, underscores, slashes and equal signs."""

    def broken(code: re.Match[str]) -> str:
        return "<code>" + re.sub(r"(?<=[._/=])(?=\w)", "<wbr>", code[1]) + "</code>"

    pieces = re.split(r"(<pre\b.*?</pre>)", page, flags=re.DOTALL)
    return "".join(
        piece if number % 2 else re.sub(r"<code>([^<]{16,})</code>", broken, piece)
        for number, piece in enumerate(pieces)
    )


def with_links(page: str, to_keys: str) -> str:
    """Return HTML in which names of keys, also `rollout.n=8`, link to the page of keys at ``to_keys``."""

    def link(code: re.Match[str]) -> str:
        whole = full_name(code["name"])
        return f'<a href="{to_keys}#{whole}">{code[0]}</a>' if whole else code[0]

    # A link cannot be inside a link, a heading or a listing.
    pieces = re.split(r"(<a\b.*?</a>|<h\d\b.*?</h\d>|<pre\b.*?</pre>)", page, flags=re.DOTALL)
    return "".join(piece if number % 2 else _CODE.sub(link, piece) for number, piece in enumerate(pieces))
