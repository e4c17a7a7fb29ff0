"""A notebook as a page: its texts, its cells, and the saved output of its last run.

`python -m scripts.site.notebooks` runs all of them and saves their printed and drawn output, without logs.
"""

import json
import re
from pathlib import Path
from typing import Any

from scripts.site.pages import ROOT


def notebooks() -> dict[str, str]:
    """Return page -> the notebook that it shows."""
    files = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
    return {f"{name}.md": name for name in (str(file.relative_to(ROOT)) for file in files)}


def notebook_page(notebook: str) -> str:
    """Return the Markdown of a notebook."""
    cells = json.loads((ROOT / notebook).read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell)) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] != "code":
        return [source]
    return [f"```python\n{source}\n```", *filter(None, map(_output, cell["outputs"]))]


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output.get("data", {})
    if "image/png" in data:
        return f"![what the cell above draws](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})"
    return f"```text\n{''.join(data['text/plain'])}\n```" if "text/plain" in data else ""


def source_of(notebook: Path) -> list[str]:
    """Return the text of every code cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(notebook: Path) -> None:
    """Run a notebook and save its output. Raises CellExecutionError."""
    # These packages are imported here, because the pages are generated without them.
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(notebook, as_version=4)
    NotebookClient(content, timeout=1800, resources={"metadata": {"path": str(notebook.parent)}}).execute()
    for cell in content.cells:
        cell.metadata.pop("execution", None)  # its execution time
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _is_kept(output)]
            for output in filter(lambda output: "text" in output, cell.outputs):
                output.text = re.sub(r"/\S*/rltrain_\w+", "WORK", output.text)
    content.metadata = {name: content.metadata[name] for name in ("kernelspec",)} | {
        "language_info": {"name": "python"}
    }
    notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_kept(output: Any) -> bool:
    """Return False for logs (display_data) and warnings of packages (stderr)."""
    return output.output_type == "execute_result" or output.get("name") == "stdout"


if __name__ == "__main__":
    for name in notebooks().values():
        run(ROOT / name)
