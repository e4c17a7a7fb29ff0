"""The notebooks of examples/notebooks run unchanged, and their links are valid."""

import ast
import json
import os
from pathlib import Path

import pytest

from rltrain.config.load import load_config
from rltrain.config.verl.keys import leaves_of
from scripts.site.notebooks import source_of

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_settings_of_a_notebook_are_keys(notebook):
    tree = ast.parse("\n".join(source_of(notebook)))
    dictionaries = [
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "settings"
    ]  # fmt: skip
    (settings,) = dictionaries
    # What is no literal is a path.
    for node in ast.walk(settings):
        if isinstance(node, ast.Dict):
            node.values = [value if _literal(value) else ast.Constant("path") for value in node.values]
    given = ast.literal_eval(settings)
    assert len(list(leaves_of(given))) > 10
    load_config([], [given])  # raises ConfigError where a key is unknown


def _literal(node):
    return not any(isinstance(inner, ast.Name | ast.Call) for inner in ast.walk(node)) or isinstance(node, ast.Dict)


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_as_it_stands(notebook, monkeypatch):
    # Nothing else needs them.
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]))
    content = nbformat.read(notebook, as_version=4)
    NotebookClient(content, timeout=900, resources={"metadata": {"path": str(FOLDER)}}).execute()
    said = json.dumps(content)
    assert "held-out accuracy: " in said or "mean score " in said
