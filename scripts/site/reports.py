"""Pages of runs: report.html, made by the code as it is from what examples/reports/ keeps of a run."""

from functools import cache

from scripts.site.pages import ROOT

_FOLDER = "examples/reports"
INDEX = f"{_FOLDER}/README.md"
"""The list of the runs."""


def reports() -> dict[str, str]:
    """File of the site -> the folder of the run that it shows."""
    return {
        f"{_FOLDER}/{file.parent.name}.html": f"{_FOLDER}/{file.parent.name}"
        for file in (ROOT / _FOLDER).glob("*/metrics.jsonl")
    }


@cache
def report(folder: str) -> str:
    """The page of a run as HTML, which opens offline."""
    from rltrain.run.report.page import page_of  # takes seconds, and whoever asks for the list needs none of it

    return page_of(ROOT / folder)
