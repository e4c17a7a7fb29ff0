"""Runs of the examples' shell scripts with a Python that records its arguments."""

import subprocess
from pathlib import Path

from rltrain.main_ppo import main

ROOT = Path(__file__).parent.parent.parent
# In place of the real one, which installs packages.
SETUP = f"""
REPO={ROOT} PYTHON={{python}}
setup_env() {{{{ :; }}}}
say() {{{{ :; }}}}
handing_on_signals() {{{{ "$@"; }}}}
"""


def run_example(folder: Path, name: str, **environment: object) -> subprocess.CompletedProcess:
    for each in ("scripts", "examples"):
        (folder / each).mkdir()
    (folder / "scripts" / "setup_env.sh").write_text(SETUP.format(python=folder / "python"))
    (folder / "python").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" --end-- >>{folder}/commands\n')
    (folder / "python").chmod(0o755)
    script = folder / "examples" / name
    script.write_text((ROOT / "examples" / name).read_text())
    variables = [f"{key}={value}" for key, value in {"OUT": folder / "out", **environment}.items()]
    command = ["env", *variables, "bash", str(script), "--dry-run"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def accept_commands(folder: Path, converter, script, name: str, capsys) -> None:
    """Run the converter, the maker of the model and the dry run with the example's arguments."""
    convert, make, train = (lines.split("\n") for lines in (folder / "commands").read_text().split("--end--\n")[:3])
    assert convert[:2] == ["-m", converter.__name__]
    assert converter.main(convert[2:-1]) == 0
    assert make[0] == f"scripts/{name}.py"
    assert script.main(make[1:-1]) == 0
    assert train[:2] == ["-m", "rltrain.main_ppo"]
    capsys.readouterr()
    assert main(train[2:-1]) == 0
    out, error = capsys.readouterr()
    assert "a run would start" in out
    assert not error
