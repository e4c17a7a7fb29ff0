"""`rltrain sweep`: all combinations, one after the other, even if one fails."""

import json
from pathlib import Path

import pytest

from rltrain.api import RunResult
from rltrain.common.errors import DataError
from rltrain.config.load import to_yaml
from rltrain.run import build
from rltrain.tools import compare as compare_tool
from rltrain.tools import sweep
from rltrain.tools.sweep import combinations, main, values_of
from tests.config.commands import BASE, A
from tests.tiny import small_run


@pytest.fixture
def made(monkeypatch, tmp_path, capsys):
    """made(*words, ends=…): return exit code, output, and the names of the started runs. ends: error or exit code of a
    run by name."""

    def begin_ray(cfg, stop, closing):
        return False

    def call(*words, ends=None):
        begun = []

        def train(loaded):
            folder = Path(loaded.config.trainer.default_local_dir)
            begun.append(folder.name)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(to_yaml(loaded.config))
            end = (ends or {}).get(folder.name, 0)
            if isinstance(end, Exception):
                raise end
            return RunResult(folder, end)

        def compare(folders, out):
            print("compared", *(path.name for path in folders))

        for home, stand_in in ((sweep, train), (compare_tool, compare), (build, begin_ray)):
            monkeypatch.setattr(home, stand_in.__name__, stand_in)
        code = main([*BASE, "trainer.device=cpu", "trainer.n_gpus_per_node=1", "--out", str(tmp_path / "out"), *words])
        printed = capsys.readouterr()
        return code, printed.out + printed.err, begun

    return call


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,3", ["1", "2", "3"]), ("[1,2],[3]", ["[1,2]", "[3]"]), ('"a,b",c', ['"a,b"', "c"]),
        ("{a: 1, b: 2}", ["{a: 1, b: 2}"]), ("it's,b", ["it's", "b"]), ("['a]',b]", ["['a]',b]"]),
    ],
)  # fmt: skip
def test_a_comma_in_brackets_or_quotes_makes_no_list(text, values):
    assert values_of(text) == values


def test_all_combinations_have_readable_names():
    runs = combinations(["a.lr=1e-6,1e-5", "b=[1,2]", "data.seed=1,2"])
    assert [name for name, _ in runs] == ["lr=1e-6_seed=1", "lr=1e-6_seed=2", "lr=1e-5_seed=1", "lr=1e-5_seed=2"]
    assert runs[1][1] == ["b=[1,2]", "a.lr=1e-6", "data.seed=2"]
    assert next(name for name, _ in combinations(["a.lr=1,2", "b.lr=3,4"])) == "a.lr=1_b.lr=3"
    assert [name for name, _ in combinations(["path=/x/a b,/x/a?b"])] == ["path=-x-a-b", "path=-x-a-b_2"]


def test_every_run_has_a_folder_and_a_name_of_its_own_and_all_are_compared(made, tmp_path):
    code, text, begun = made("data.seed=1,2", f"{A}actor.optim.lr=1e-6,1e-5")
    names = ["seed=1_lr=1e-6", "seed=1_lr=1e-5", "seed=2_lr=1e-6", "seed=2_lr=1e-5"]
    assert (code, begun) == (0, names)
    assert f"compared {' '.join(names)}" in text
    assert "4 of 4 runs are finished" in text
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert {entry["state"] for entry in record.values()} == {"finished"}


def test_a_run_that_fails_is_told_and_the_others_are_made_and_the_same_command_goes_on(made):
    code, text, begun = made("data.seed=1,2,3", ends={"seed=2": DataError("a row is wrong")})
    assert (code, begun) == (2, ["seed=1", "seed=2", "seed=3"])
    assert "seed=2: error: a row is wrong" in text
    assert "compared seed=1 seed=3" in text
    code, text, begun = made("data.seed=1,2,3")
    assert (code, begun) == (0, ["seed=2"])
    assert "seed=1: finished before" in text
    # With more steps a finished run goes on; with other settings it would count as what it is not.
    assert made("data.seed=1,2,3", "trainer.total_training_steps=7")[2] == ["seed=1", "seed=2", "seed=3"]
    code, text, begun = made("data.seed=1,2,3", "actor_rollout_ref.actor.optim.lr=0.5")
    assert (code, begun) == (2, [])
    assert "seed=1 is a finished run of this sweep with different settings" in text


def test_a_signal_ends_the_sweep(made):
    code, text, begun = made("data.seed=1,2,3", ends={"seed=2": 130})
    assert (code, begun) == (130, ["seed=1", "seed=2"])
    assert "1 of 3 runs are finished" in text
    assert "  seed=3: not started" in text
    assert made("data.seed=1,2,3")[2] == ["seed=2", "seed=3"]
    # Whoever starts it again looks at the code, also where another run has failed.
    assert made("data.seed=4,5,6", ends={"seed=4": ZeroDivisionError("oh"), "seed=5": 75})[0] == 75


def test_a_wrong_key_ends_before_the_first_run(made):
    code, text, begun = made("data.seed=1,2", "algorithm.adv_estimater=grpo")
    assert (code, begun) == (2, [])
    assert text.count("unknown key 'algorithm.adv_estimater'") == 1
    code, text, begun = made("algorithm.adv_estimator=grpo,grpa")
    assert (code, begun) == (2, [])
    assert "adv_estimator=grpa: algorithm.adv_estimator=grpa: 'grpa' is not known" in text
    assert "nothing is swept" in made()[1]
    assert "use --out" in made("trainer.default_local_dir=a,b")[1]
    assert "a value of the list is empty" in made("data.seed=1,")[1]


def test_a_dry_run_says_of_every_run_whether_it_would_start(made, monkeypatch):
    looked = []

    def dry_run(loaded, notes):
        looked.append(loaded.config.data.seed)
        return "plan\na run would refuse\n", loaded.config.data.seed == 2

    monkeypatch.setattr("rltrain.run.dry_run.dry_run", dry_run)
    code, text, begun = made("data.seed=1,2", "--dry-run")
    assert (code, begun, looked) == (2, [], [1, 2])
    assert "seed=1: would start" in text
    assert "seed=2: would be refused" in text
    assert "  a run would refuse" in text


@pytest.mark.long
@pytest.mark.ray  # `main` starts it
def test_real_runs_on_one_ray_are_resumed_and_compared(tiny_model, arithmetic_files, tmp_path):
    words = small_run(tiny_model, arithmetic_files, tmp_path / "runs", trainer__total_training_steps=1)
    swept = [*words, "data.seed=1,2", "actor_rollout_ref.actor.clip_ratio=0.2,nan"]
    assert main(swept) == 2
    assert main([*words, "data.seed=1,2"]) == 0
    assert "data.seed" in json.loads((tmp_path / "runs" / "compare.json").read_text())["settings"]
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert folders == ["seed=1", "seed=2"]
    assert main([*words, "data.seed=1,2", "trainer.total_training_steps=2"]) == 0
    lines = (tmp_path / "runs" / "seed=2" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
