"""The recipes of examples/vlm_npu: with data as the converters make them, and tiny models of their families."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from rltrain import dry_run
from rltrain.data_preprocess import geometry3k, virl39k
from rltrain.main_ppo import main
from rltrain.trainer import preflight
from tests.tiny_vision import picture, save_tiny_vision_model

FOLDER = Path(__file__).parent.parent.parent / "examples" / "vlm_npu"
# Script -> the family of its model, its data, and what the plan says of a step.
RECIPES = {
    "qwen2_5_vl_3b_geometry3k_grpo.sh": ("qwen2_5_vl", "geometry3k", "128 (4 answers to each prompt)"),
    "qwen3_vl_2b_geometry3k_grpo.sh": ("qwen3_vl", "geometry3k", "128 (4 answers to each prompt)"),
    "qwen2_5_vl_3b_virl39k_grpo_multinode.sh": ("qwen2_5_vl", "virl39k", "2,640 (5 answers to each prompt)"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a converted folder for each data set and a model folder for each family."""
    folder = tmp_path_factory.mktemp("recipes")
    sources = {
        geometry3k: {"images": ["images/a.png"], "problem": "<image>Find x.", "answer": "7"},
        virl39k: {"image": ["images/a.png"] * 2, "question": "Which?", "answer": "\\boxed{A}", "category": "Charts"},
    }
    for convert, record in sources.items():
        name = convert.__name__.rpartition(".")[2]
        source = folder / f"{name}_source"
        (source / "images").mkdir(parents=True)
        picture(60, 900).save(source / "images" / "a.png")
        text = next(key for key in ("problem", "question") if key in record)
        for split, count in (("train", 530), ("test", 4)):
            rows = [record | {text: f"{record[text]} {number} {split}"} for number in range(count)]
            (source / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        assert convert.main(["--input", str(source), "--output", str(folder / name)]) == 0
    for family in ("qwen2_5_vl", "qwen3_vl"):
        save_tiny_vision_model(folder / family, family, tied=True, positions=32_768)
    return folder


@pytest.fixture
def words(tmp_path, made):
    """words(script, *more): what a script starts ``python`` with."""
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)

    def run(script: str, *more: str) -> list[str]:
        family, data, _ = RECIPES[script]
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": str(made / family), "DATA": str(made / data),
            "VAL": str(made / "geometry3k" / "test.parquet"),
        }  # fmt: skip
        done = subprocess.run(
            ["bash", FOLDER / script, *more], capture_output=True, text=True, check=True, env=environment
        )
        module, *arguments = done.stdout.splitlines()[1:]
        assert module == "rltrain.main_ppo"
        return arguments

    return run


@pytest.mark.parametrize(
    ("script", "device"), [*((script, "npu") for script in RECIPES), (next(iter(RECIPES)), "cuda")]
)
def test_a_recipe_would_run_on_its_devices(script, device, words, monkeypatch, capsys, tmp_path):
    # The devices and packages of the machine that it is for.
    monkeypatch.setattr(preflight, "_devices", lambda loaded: [])
    monkeypatch.setattr(preflight, "_packages", lambda loaded: [])
    monkeypatch.setattr(preflight, "ray_problems", lambda cfg: [])
    monkeypatch.setattr(dry_run, "_MOST_ROWS", 8)
    given = words(script, f"trainer.device={device}", f"trainer.default_local_dir={tmp_path / 'run'}", "--dry-run")
    code = main(given)
    out, error = capsys.readouterr()
    assert (code, error) == (0, ""), out
    assert RECIPES[script][2] in out
    # No key of a recipe is without effect, and its data have nothing that a run would stumble over.
    assert "no effect" not in out
    assert "nothing found" in out


def test_every_recipe_of_the_folder_is_tested():
    assert {file.name for file in FOLDER.glob("*.sh")} == RECIPES.keys()
