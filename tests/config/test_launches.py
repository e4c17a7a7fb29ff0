"""Recorded launches of public verl scripts, walked through ``--dry-run``: which run, and why the others do not.

A launch is a block of ``launches/*.txt``: the script's path in verl (with the knobs that were set, as ``NAME=value``),
its version and kind, what happens to it, and the words after ``python -m verl.trainer.main_ppo`` with all variables of
the shell expanded. ``HOME`` and ``DATA`` stand for folders. What happens is ``runs``; ``refused: words`` where a
decision of docs/from-verl.md refuses it and the message has these words; or ``not yet: words`` for a gap.
Kinds other than ``text`` (text-only FSDP) are outside of the promise. Models and files are replaced by small ones.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from rltrain import dry_run
from rltrain.main_ppo import main
from rltrain.trainer import preflight
from tests.tiny import save_tiny_adapter, save_tiny_model, save_tiny_reward_model, write_arithmetic

FOLDER = Path(__file__).parent / "launches"


@dataclass(frozen=True)
class Launch:
    name: str
    version: str
    kind: str
    outcome: str
    words: tuple[str, ...]


def recorded() -> list[Launch]:
    found = []
    for file in sorted(FOLDER.glob("*.txt")):
        for block in file.read_text().strip().split("\n\n"):
            name, about, outcome, *words = block.splitlines()
            version, kind = about[2:].split(", ")
            found.append(Launch(name[2:], version, kind, outcome[2:], tuple(words)))
    return found


LAUNCHES = recorded()


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """key -> what stands for the value that a launch gives it."""
    folder = tmp_path_factory.mktemp("launches")
    model = save_tiny_model(folder / "model", heads=16, kv_heads=16, positions=131_072)
    data = write_arithmetic(folder / "data.parquet", range(5000))
    code = folder / "code.py"
    score = "{'score': 1.0, 'acc': 1.0, 'accuracy_reward': 1.0, 'format_reward': 1.0}"
    names = ("compute_score", "my_reward_function", "char_count_reward_function", "compute_score_fapo")
    code.write_text("".join(f"def {name}(*rest, **named):\n    return {score}\n" for name in names))
    models = ("actor_rollout_ref.model.path", "critic.model.path")
    judges = ("reward_model.model.path", "reward_model.model_path", "reward.reward_model.model_path")
    codes = ("custom_reward_function.path", "reward.custom_reward_function.path")
    adapter = save_tiny_adapter(folder / "adapter", model)
    folders = {"trainer.default_local_dir": folder / "run", "actor_rollout_ref.model.lora_adapter_path": adapter}
    files = {("data.train_files", "data.val_files"): data, codes: code, models: model,
             judges: save_tiny_reward_model(folder / "judge", heads=16)}  # fmt: skip
    return folders | {key: instead for keys, instead in files.items() for key in keys}


@pytest.fixture
def walk(stand_ins, monkeypatch, capsys):
    """walk(launch): None, or the text of the refusal."""
    # The devices and packages of the machine that the script was written for.
    monkeypatch.setattr(preflight, "_devices", lambda loaded: [])
    monkeypatch.setattr(preflight, "_packages", lambda loaded: [])
    monkeypatch.setattr(preflight, "ray_problems", lambda cfg: [])
    monkeypatch.setattr(dry_run, "_MOST_ROWS", 8)
    # Rows and reward functions are ours, so what they are like says nothing of the launch.
    monkeypatch.setattr(dry_run, "_try_reward", lambda cfg, rows, found: [])
    monkeypatch.setattr(dry_run, "_look_at", lambda cfg, rows, found: [])

    def run(launch: Launch) -> str | None:
        given = [word.lstrip("+").partition("=") for word in launch.words]
        instead = [f"{key}={stand_ins[key]}" for key, _, value in given if key in stand_ins and value != "null"]
        code = main([*launch.words, *instead, "--dry-run"])
        out, error = capsys.readouterr()
        assert code in (0, 2), error
        return None if code == 0 else error + out[out.find("a run would refuse") :]

    return run


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch.version}-{launch.name}")
def test_a_recorded_launch_ends_as_recorded(launch, walk):
    refusal = walk(launch)
    expected, _, words = launch.outcome.partition(": ")
    if expected == "runs":
        assert refusal is None
    else:
        assert expected in ("refused", "not yet")
        assert refusal is not None, "it runs now: say so in its block"
        assert words in refusal


def share(version: str | None = None) -> tuple[int, int, int]:
    """Launches within the promise: those that run, those that a decision refuses, and all."""
    text = [
        each.outcome.partition(":")[0] for each in LAUNCHES if each.kind == "text" and version in (None, each.version)
    ]
    return text.count("runs"), text.count("refused"), len(text)


def test_every_launch_runs_that_no_decision_refuses():
    """``pytest -s`` prints the shares."""
    for version in [*sorted({each.version for each in LAUNCHES}), None]:
        run, decided, total = share(version)
        print(f"{version or 'all'}: {run} of {total} run = {run / total:.0%}, a decision refuses {decided}")
    run, decided, total = share()
    assert total >= 60
    assert run == total - decided
