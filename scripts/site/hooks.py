"""Hooks that MkDocs calls to build the site (mkdocs.yml): pages, their order, and pages generated from code."""

from collections.abc import Iterable
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import rltrain
from scripts.site.keys import breakable, keys_page, with_links
from scripts.site.notebooks import notebook_page, notebooks
from scripts.site.pages import API, INDEX, KEYS, ROOT, parts, plain_pipes, relinked, search_boost, written
from scripts.site.recipes import as_listed, recipe_page, recipes, with_pages
from scripts.site.reports import INDEX as REPORTS
from scripts.site.reports import report, reports

# Page of the index -> generated pages listed next to it, and lists that would be too long for the index.
_BESIDE = {
    "docs/api.md": [API, KEYS],
    "docs/logging.md": [REPORTS],
    "examples/README.md": as_listed(recipes()),
    "bench/README.md": [name for name in written() if name.startswith("bench/results/") and name.endswith(".md")],
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation: README, then the parts of the index."""
    config.nav = [{"rltrain": ["README.md", INDEX, *as_listed(notebooks())]}]
    for heading, pages in parts().items():
        listed: list[Any] = []
        for page in pages:
            if page == "README.md":
                continue
            beside = _BESIDE.get(page, [])
            many = len(beside) > 2
            listed += [{_title(page): [page, *beside]}] if many else [page, *beside]
        config.nav.append({heading: listed})
    config.nav.append({"Changes": ["CHANGELOG.md"]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return all files of the site, at their paths in the repository."""
    theme = [file for file in files if not file.src_uri.endswith((".md", ".svg")) and file.src_dir != config.docs_dir]

    def placed(names: Iterable[str]) -> list[File]:
        return [File.generated(config, name, abs_src_path=str(ROOT / name)) for name in names]

    made = {
        KEYS: keys_page(),
        API: _api_page(),
        **{page: recipe_page(page, script) for page, script in recipes().items()},
        **{page: notebook_page(notebook) for page, notebook in notebooks().items()},
        **{file: report(folder) for file, folder in reports().items()},
    }
    made_files = [File.generated(config, name, content=text) for name, text in made.items()]
    return Files(
        [*theme, *placed([*written(), "scripts/site/style.css", "scripts/site/iframe-worker.js"]), *made_files]
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the Markdown of a page for MkDocs."""
    place = page.file.src_uri
    page.meta["search"] = {"boost": search_boost(place)}
    if place == "examples/README.md":
        markdown = with_pages(markdown)
    # A linked script, notebook or run folder is shown on a separate page.
    own = {file: made for made, file in [*recipes().items(), *notebooks().items(), *reports().items()]}
    markdown = relinked(markdown, place, place, own)
    return plain_pipes(markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return HTML in which names of keys link to their description."""
    keys = files.get_file_from_path(KEYS)
    assert keys
    if page.file.src_uri != "CHANGELOG.md":
        content = with_links(content, "" if page.file.src_uri == KEYS else keys.url_relative_to(page.file))
    return breakable(content)


def _api_page() -> str:
    """Return the page of all public names, from their docstrings."""
    text = "# Names of the Python interface\n\n[From Python](api.md) explains how to use them.\n"
    homes = {name: rltrain._HOMES[name] for name in rltrain.__all__ if name in rltrain._HOMES}
    order = ["train", "build", "evaluate", "load_config", "read_metrics", "read_samples", "tool"]
    names = [*order, *sorted(set(homes) - set(order))]
    return text + "".join(f"\n::: {homes[name]}.{name}\n" for name in names)


def _title(page: str) -> str:
    """Return the first heading of a page of the repository."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return next(line[2:] for line in lines if line.startswith("# "))
