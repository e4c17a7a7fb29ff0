"""The pages of the site, their order, and conversion of their Markdown for MkDocs."""

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
INDEX = "docs/README.md"
"""The only table of contents: a heading for each part, and below it a table whose last cells link to pages."""
KEYS, API = "docs/keys.md", "docs/api-reference.md"
"""Pages that are generated with the site."""

_HEADING = re.compile(r"^## (.+)$")
_LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def written() -> list[str]:
    """Return the Markdown files of the repository that are pages, and the pictures that they show."""
    patterns = (
        "*.md",
        "docs/*.md",
        "docs/*.svg",
        "bench/*.md",
        "tests/README.md",
        "bench/results/*",
        "examples/*.md",
        "examples/*/*.md",
    )
    return [str(file.relative_to(ROOT)) for pattern in patterns for file in sorted(ROOT.glob(pattern))]


def search_boost(page: str) -> float:
    """Return the factor of a page in search results: keys, guides, comparisons, measurements, tests and changes."""
    if page == KEYS:
        return 4.0
    if page.startswith(("docs/from-", "docs/verified")):
        return 1.2
    last = {"docs/": 2.0, "examples/": 0.5, "bench/": 0.2, "tests/": 0.2, "CHANGELOG": 0.2}
    return next((boost for start, boost in last.items() if page.startswith(start)), 1.0)


def parts() -> dict[str, list[str]]:
    """Return heading of `INDEX` -> the pages that its table links to, each once."""
    named: dict[str, list[str]] = {}
    seen: set[str] = set()
    pages: list[str] = []
    for line in (ROOT / INDEX).read_text(encoding="utf-8").splitlines():
        if heading := _HEADING.match(line):
            pages = named.setdefault(heading[1], [])
        elif line.startswith("|"):
            for link in _LINK.finditer(line):
                page = posixpath.normpath(posixpath.join(posixpath.dirname(INDEX), link["target"]))
                if page not in seen and "://" not in link["target"]:
                    seen.add(page)
                    pages.append(page)
    return named


def linked(text: str, page: str) -> Iterator[tuple[str, str]]:
    """Yield (link as written, target file in the repository) for all links of a page to files."""
    for link in _LINK.finditer(text):
        if "://" not in link["target"] and not link["target"].startswith("mailto:"):
            yield link["target"], posixpath.normpath(posixpath.join(posixpath.dirname(page), link["target"]))


def moved(text: str, page: str, other: str) -> str:
    """Return the Markdown of ``page`` with links that work in ``other``."""
    return relinked(text, page, other, {})


def relinked(text: str, page: str, other: str, instead: Mapping[str, str]) -> str:
    """Return the Markdown of ``page`` for the path of ``other``; links to files in ``instead`` lead to its values."""

    def anew(link: re.Match[str]) -> str:
        if "://" in link["target"]:
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), link["target"]))
        place = posixpath.relpath(instead.get(file, file), posixpath.dirname(other) or ".")
        return f"]({place}{link['anchor'] or ''})"

    return _LINK.sub(anew, text)


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of every table row of a page, including heads."""
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def plain_pipes(text: str) -> str:
    r"""Return Markdown whose code in tables has | for \|, which only GitHub needs."""
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), text)
