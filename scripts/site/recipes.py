"""A page for each script of examples/: its purpose, expected result, evidence, and text."""

import posixpath
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from scripts.site.notebooks import notebooks
from scripts.site.pages import ROOT, moved, rows

INDEX = "examples/README.md"
_LINK = re.compile(r"\[[^\]]*\]\((\.\./bench/results/[\w.]+\.md)\)")
_LANGUAGES = {".sh": "bash", ".py": "python"}


def recipes() -> dict[str, str]:
    """Return page -> the script that it shows. Modules of packages (examples/agents/ready) are no scripts."""
    files = [file for ending in _LANGUAGES for file in sorted((ROOT / "examples").rglob(f"*{ending}"))]
    scripts = [str(file.relative_to(ROOT)) for file in files if not file.with_name("__init__.py").exists()]
    return {f"{name}.md": name for name in scripts}


def as_listed(pages: Mapping[str, str]) -> list[str]:
    """Return pages of files of examples/, in the order of the list of examples."""
    text = (ROOT / INDEX).read_text(encoding="utf-8")
    return sorted(pages, key=lambda page: text.find(f"`{posixpath.relpath(pages[page], 'examples')}`"))


def recipe_page(page: str, script: str) -> str:
    """Return the Markdown of the page of a script."""
    text = (ROOT / script).read_text(encoding="utf-8")
    name = posixpath.relpath(script, "examples")
    told = {cells[0]: cells for cells in _tables().get("What they should give", [])}.get(f"`{name}`")
    about = [cells for heading, table in _tables().items() if heading != "What they should give"
             for cells in table if cells[0] == f"`{name}`"]  # fmt: skip
    parts = [f"# {Path(script).name}\n"]
    parts += [f"{cells[1][0].upper()}{cells[1][1:]}." for cells in about[:1]]
    parts += [f"```bash\n{_command(script)}\n```", "## What it should give", told[1] if told else "Nothing is known."]
    parts.append(_seen(told[2] if told else ""))
    if memory := [cells for cells in about if len(cells) > 3]:
        parts += ["## Device memory", "GiB of one device, estimated by `--dry-run` ([memory](../docs/memory.md)):",
                  "| nodes × devices | generation | training |\n|---|---|---|\n"
                  + "\n".join("| " + " | ".join(cells[2:5]) + " |" for cells in memory)]  # fmt: skip
    body = moved("\n\n".join(parts), INDEX, page)
    return f"{body}\n\n## {script}\n\n```{_LANGUAGES[Path(script).suffix]}\n{text.rstrip()}\n```\n"


def with_pages(index: str) -> str:
    """Return the list of examples, in which names of scripts and notebooks link to their pages."""
    shown = {**recipes(), **notebooks()}
    pages = {posixpath.relpath(file, "examples"): page for page, file in shown.items()}
    return re.sub(
        r"^\| `([\w./]+)`",
        lambda row: f"| [`{row[1]}`]({posixpath.relpath(pages[row[1]], 'examples')})" if row[1] in pages else row[0],
        index,
        flags=re.MULTILINE,
    )


def _tables() -> dict[str, list[list[str]]]:
    """Return heading of the list of examples -> the rows of the table below it."""
    sections = re.split(r"^## (.+)$", (ROOT / INDEX).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {heading: list(rows(text)) for heading, text in zip(sections[1::2], sections[2::2], strict=True)}


def _command(script: str) -> str:
    if script.endswith(".py"):
        usage = re.search(r"^    (python .*)$", (ROOT / script).read_text(encoding="utf-8"), re.MULTILINE)
        return usage[1] if usage else f"# named in a run, see below: {script}"
    taken = [name for name in ("MODEL", "DATA", "VAL") if f"${{{name}:-" in (ROOT / script).read_text(encoding="utf-8")]
    if not taken:
        return f"bash {script}"
    words = " ".join([*(f"{name}=…" for name in taken), "bash", script])
    return f"{words} --dry-run   # the plan\n{words}"


def _seen(cell: str) -> str:
    """Return the origin of a result: for a table of this repository, its commit."""
    tables = _LINK.findall(cell)
    notes = ["**We have not run it.**" if cell == "not run by us" else f"*Seen in:* {cell}"]
    for table in tables:
        file = posixpath.normpath(posixpath.join("examples", table))
        commit = _git("log", "-1", "--format=%h of %cs", "--", file)
        if commit:
            notes.append(f"`{file}` was written at commit {commit}.")
    return "  \n".join(filter(None, notes))


def _git(*words: str) -> str:
    """Return the output of git; "" without a history."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
