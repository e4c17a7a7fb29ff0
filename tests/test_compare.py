"""`rltrain compare`: curves, differences, settings, phases and weights of runs beside each other."""

import json

import pytest
import torch
import yaml
from safetensors.torch import save_file

from rltrain.tools.compare.__main__ import main

SCORE = "critic/score/mean"


@pytest.fixture
def make(tmp_path):
    """make(name, scores, ...): the folder of a run with these scores from its first step on."""

    def run(name, scores, first=1, settings=None, environment=None, **more):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        lines = [
            {
                "step": step,
                SCORE: score,
                "timing_s/step": 2.0,
                **{key: values[step - first] for key, values in more.items()},
            }
            for step, score in enumerate(scores, first)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = {"data": {"seed": 1}, "trainer": {"default_local_dir": str(folder)}, **(settings or {})}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "env.json").write_text(json.dumps({"torch": "2.10", "command": name, **(environment or {})}))
        return folder

    return run


@pytest.fixture
def compare(tmp_path, capsys, monkeypatch):
    """compare(folders…): exit code, what is printed, and what compare.json holds. drawn: with the page."""
    monkeypatch.chdir(tmp_path)

    def call(*words, drawn=False):
        if not drawn:  # it takes a second
            monkeypatch.setattr("rltrain.tools.compare.__main__.write", lambda comparison, metrics, file: file.touch())
        code, out = main([*map(str, words)]), tmp_path / "compare" / "compare.json"
        printed = capsys.readouterr()
        return code, printed.out + printed.err, json.loads(out.read_text()) if out.exists() else None

    return call


def export(folder, step, **tensors):
    (model := folder / f"global_step_{step}" / "huggingface").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    save_file({name: torch.tensor(values) for name, values in tensors.items()}, model / "model.safetensors")


def test_a_comparison_has_differences_settings_environments_and_phases(make, compare, tmp_path):
    first = make("gpu", [0.5, 1.0, 2.0], environment={"torch-npu": "2.10"})
    other = make("npu", [0.51, 1.02, 4.0], first=1, settings={"data": {"seed": 1, "shuffle": False}})
    code, text, found = compare(first, other, drawn=True)
    assert code == 0
    score = found["metrics"][SCORE]["differences"]["npu"]
    assert score["mean_absolute"] == pytest.approx((0.01 + 0.02 + 2) / 3)
    assert score["mean_relative"] == pytest.approx((0.02 + 0.02 + 1) / 3)
    assert (score["steps"], score["limit_of_relative"], score["passes"]) == (3, 0.04, False)
    assert found["settings"] == {"data.shuffle": {"gpu": None, "npu": False}}
    assert found["environment"] == {"torch-npu": {"gpu": "2.10", "npu": None}}
    assert [run["means_of_a_step"]["step"] for run in found["runs"]] == [2.0, 2.0]
    assert "34.67 %" in text
    assert "FAILS (4 %)" in text
    assert "data.shuffle" in text
    page = (tmp_path / "compare" / "compare.html").read_text()
    assert page.count("data-root-id") == len(found["metrics"])
    assert "Settings that differ" in page
    assert sorted(file.name for file in (tmp_path / "compare").iterdir()) == ["compare.html", "compare.json"]


@pytest.mark.parametrize(
    ("scores", "relative", "passes"),
    [([0.52, 1.04], 0.04, True), ([0.53, 1.04], 0.05, False), ([0.5, 1.0], 0.0, True)],
)
def test_four_percent_pass(scores, relative, passes, make, compare):
    _, _, found = compare(make("a", [0.5, 1.0]), make("b", scores))
    difference = found["metrics"][SCORE]["differences"]["b"]
    assert difference["mean_relative"] == pytest.approx(relative)
    assert difference["passes"] is passes


def test_what_differs_from_nothing_is_no_relative_difference_and_never_passes(make, compare):
    """Steps where both are 0 are the same; where the first alone is 0, there is no ratio."""
    _, text, found = compare(make("a", [0.0, 0.0, 1.0]), make("b", [0.0, 0.1, 1.0]))
    difference = found["metrics"][SCORE]["differences"]["b"]
    assert (difference["mean_relative"], difference["steps_left_out_of_relative"], difference["passes"]) == (
        0.0,
        1,
        False,
    )
    assert "without 1 step of 0" in text


def test_only_steps_in_common_are_compared(make, compare):
    _, _, found = compare(make("a", [1.0, 2.0, 3.0]), make("b", [2.0, 3.0, 9.0], first=2))
    assert found["metrics"][SCORE]["differences"]["b"]["mean_absolute"] == 0
    assert found["metrics"][SCORE]["differences"]["b"]["steps"] == 2


def test_runs_that_differ_in_seeds_alone_are_one_line(make, compare):
    seeds = [make(f"s{seed}", [seed * 1.0, seed * 2.0], settings={"data": {"seed": seed}}) for seed in (1, 2, 3)]
    other = make("other", [2.0, 4.0], settings={"data": {"seed": 1, "shuffle": False}})
    _, text, found = compare(*seeds, other)
    assert [run["line"] for run in found["runs"]] == ["s1 (+2)", "s1 (+2)", "s1 (+2)", "other"]
    assert found["metrics"][SCORE]["mean"] == {"s1 (+2)": 3.0, "other": 3.0}
    # The deviation of 1, 2, 3 is 1 and that of 2, 4, 6 is 2.
    assert found["metrics"][SCORE]["spread"] == {"s1 (+2)": 1.5}
    assert found["metrics"][SCORE]["differences"]["other"]["mean_absolute"] == 0
    assert "s1, s2, s3 (they differ in data.seed alone)" in text


@pytest.mark.parametrize("change", [{}, {"environment": {"torch": "2.9"}, "settings": {"data": {"seed": 2}}}])
def test_a_repetition_and_another_machine_are_lines_of_their_own(change, make, compare):
    _, _, found = compare(make("a", [1.0]), make("b", [1.5], **change))
    assert [run["line"] for run in found["runs"]] == ["a", "b"]


def test_weights_are_compared_at_the_newest_step_that_both_have(make, compare, monkeypatch):
    monkeypatch.setattr("rltrain.tools.compare.weights._PIECE", 1)
    first, other, alone = (make(name, [1.0, 2.0], settings={"data": {"x": name}}) for name in ("a", "b", "c"))
    for step in (1, 2):
        export(first, step, one=[[3.0], [4.0]], two=[1.0], lacking=[1.0])
        export(other, step, one=[[3.0], [4.0 + step]], two=[1.0])
    _, text, found = compare(first, other, alone)
    weights = found["weights"]["b"]
    assert weights["step"] == 2
    assert weights["by_tensor"] == {"one": pytest.approx(2 / 5), "two": 0.0}
    assert weights["whole"] == pytest.approx(2 / 26**0.5)
    assert weights["unlike"] == ["lacking"]
    assert "0.4  one" in text
    assert found["weights"]["c"] == {"not_compared": "no checkpoint of the same step with an exported model in both"}


def test_metrics_are_chosen_by_patterns(make, compare):
    runs = [make(name, [1.0], **{"my/one": [2.0], "my/two": [3.0]}) for name in ("a", "b")]
    assert list(compare(*runs, "--metrics", "my/*", SCORE)[2]["metrics"]) == ["my/one", "my/two", SCORE]
    code, text, _ = compare(*runs, "--metrics", "my/on")
    assert code == 2
    assert text == "error: --metrics my/on: no run has this metric. Near: my/one, my/two.\n"


def test_what_an_earlier_start_has_left_has_the_settings_of_the_run(make, compare):
    run, other = make("a", [1.0, 2.0], settings={"data": {"seed": 4}}), make("b", [1.0])
    (run / "earlier_1").mkdir()
    (run / "metrics.jsonl").rename(run / "earlier_1" / "metrics.jsonl")
    _, _, found = compare(run / "earlier_1", other, "--metrics", SCORE)
    assert found["runs"][0]["seeds"] == {"data.seed": 4}


def test_bad_input_is_one_sentence(make, compare, tmp_path):
    run, late = make("a", [1.0]), make("b", [1.0], first=5)
    (empty := tmp_path / "empty").mkdir()
    (empty / "metrics.jsonl").write_text("")
    for words, said in (
        ([run, tmp_path / "nothing"], "does not exist. Give the run folder"),
        ([run, empty], "has no step in its metrics.jsonl"),
        ([run, late], "a and b have no step in common"),
        ([run, run], "one run is named twice"),
        ([run], "is one run. Give two or more"),
    ):
        code, text, found = compare(*words)
        assert (code, found) == (2, None)
        assert text.startswith("error: ")
        assert said in text
        assert text.count("\n") == 1
