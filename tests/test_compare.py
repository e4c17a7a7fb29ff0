"""`rltrain compare`: values, paired differences with intervals, settings that differ, and the page of several runs."""

import json

import numpy as np
import pytest
import yaml

from rltrain.tools.compare import main

SCORE = "critic/score/mean"


@pytest.fixture
def make(tmp_path):
    """make(name, scores, ...): create the folder of a run with these scores from its first step on."""

    def run(name, scores, first=1, settings=None, environment=None):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        lines = [{"step": step, SCORE: float(score), "timing_s/step": 2.0} for step, score in enumerate(scores, first)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = {"data": {"seed": 1}, "trainer": {"default_local_dir": str(folder)}, **(settings or {})}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "env.json").write_text(json.dumps({"torch": "2.10", "command": name, **(environment or {})}))
        return folder

    return run


@pytest.fixture
def compare(tmp_path, capsys, monkeypatch):
    """compare(folders…): return exit code, output, and compare.json with its rows by metric and line. drawn: with the
    page."""
    monkeypatch.chdir(tmp_path)

    def call(*words, drawn=False):
        if not drawn:  # it takes a second
            monkeypatch.setattr("rltrain.tools.compare.write_text", lambda *_: None)
        code, out = main([*map(str, words)]), tmp_path / "compare" / "compare.json"
        printed = capsys.readouterr()
        found = json.loads(out.read_text()) if out.exists() else None
        if found:
            found["metrics"] = {(row["metric"], row["line"]): row for row in found["metrics"]}
        return code, printed.out + printed.err, found

    return call


def test_a_comparison_has_values_differences_and_settings(make, compare, tmp_path):
    first = make("gpu", [0.5, 2.0, 1.0], environment={"torch-npu": "2.10"})
    other = make("npu", [0.6, 2.3, 1.5], settings={"data": {"seed": 1, "shuffle": False}})
    code, text, found = compare(first, other, drawn=True)
    assert code == 0
    row = found["metrics"][SCORE, "gpu"]
    assert (row["steps"], row["first"], row["last"], row["best"]) == (3, 0.5, 1.0, 2.0)
    assert "difference" not in row
    row = found["metrics"][SCORE, "npu"]
    assert row["difference"] == pytest.approx((0.1 + 0.3 + 0.5) / 3)
    assert "low" not in row, "three steps do not say how much steps vary"
    assert row["over"] == "3 steps"
    assert found["settings"] == {
        "data.shuffle": {"gpu": None, "npu": False},
        "env.torch-npu": {"gpu": "2.10", "npu": None},
    }
    assert "data.shuffle" in text
    page = (tmp_path / "compare" / "compare.html").read_text()
    assert page.count("data-root-id") == 1
    assert "Settings and versions that differ" in page
    assert sorted(file.name for file in (tmp_path / "compare").iterdir()) == ["compare.html", "compare.json"]


def test_settings_of_roles_that_no_run_has_are_left_out(make, compare):
    def settings(model, estimator="grpo"):
        roles = {"critic": {"model": {"path": model}}, "distillation": {"teacher": {"model": {"path": model}}}}
        return {"algorithm": {"adv_estimator": estimator}, **roles, "actor_rollout_ref": {"model": {"path": model}}}

    folders = make("a", [0.5], settings=settings("/m1")), make("b", [0.6], settings=settings("/m2"))
    assert [*compare(*folders)[2]["settings"]] == ["actor_rollout_ref.model.path"]
    with_critic = make("c", [0.6], settings=settings("/m2", "gae"))
    assert "critic.model.path" in compare(folders[0], with_critic)[2]["settings"]


def test_the_interval_of_single_runs_is_that_of_ten_batches_of_steps(make, compare):
    """Noise that both runs share does not affect a paired difference."""
    shared, gaps = np.random.default_rng(0).normal(size=40), np.repeat(np.arange(10.0), 4)
    _, text, found = compare(make("a", shared), make("b", shared + gaps))
    row = found["metrics"][SCORE, "b"]
    assert row["difference"] == pytest.approx(4.5)
    half = 2.262 * np.std(np.arange(10.0), ddof=1) / 10**0.5
    assert (row["low"], row["high"]) == (pytest.approx(4.5 - half), pytest.approx(4.5 + half))
    assert f"4.5 [{4.5 - half:.4g}, {4.5 + half:.4g}]" in text


def test_the_interval_of_lines_with_the_same_seeds_is_over_the_seeds(make, compare):
    """If two lines differ by the same amount in all steps, this does not predict another seed."""
    ours = [make(f"a{seed}", [seed, seed, seed], settings={"data": {"seed": seed}}) for seed in (1, 2, 3)]
    others = [make(f"b{seed}", [2.0 * seed] * 3, settings={"data": {"seed": seed, "x": 1}}) for seed in (3, 2, 1)]
    _, _, found = compare(*ours, *others)
    row = found["metrics"][SCORE, "b3 (+2)"]
    assert (row["difference"], row["over"]) == (2.0, "3 seeds, 3 steps")
    half = 4.303 * 1 / 3**0.5  # the differences are 1, 2 and 3
    assert (row["low"], row["high"]) == (pytest.approx(2 - half), pytest.approx(2 + half))


def test_runs_that_differ_in_seeds_alone_are_one_line(make, compare):
    seeds = [make(f"s{seed}", [seed * 1.0, seed * 2.0], settings={"data": {"seed": seed}}) for seed in (1, 2, 3)]
    other = make("other", [2.0, 4.0], settings={"data": {"seed": 1, "shuffle": False}})
    _, text, found = compare(*seeds, other)
    assert found["lines"] == {"s1 (+2)": ["s1", "s2", "s3"], "other": ["other"]}
    row = found["metrics"][SCORE, "s1 (+2)"]
    # The deviation of 1, 2, 3 is 1 and that of 2, 4, 6 is 2.
    assert (row["mean"], row["spread"]) == (3.0, 1.5)
    assert "3 ± 1.5" in text
    assert found["metrics"][SCORE, "other"]["difference"] == 0
    assert set(found["settings"]) == {"data.seed", "data.shuffle"}


def test_rewards_that_equal_the_scores_are_not_shown_twice(make, compare):
    """Without a KL penalty they are equal in every run. A metric that the command names is always shown."""
    reward = "critic/rewards/mean"
    runs = make("a", [0.5, 0.7]), make("b", [0.6, 0.8])
    for run in runs:
        file = run / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line | {reward: line[SCORE]}) + "\n" for line in lines))
    assert {metric for metric, _ in compare(*runs)[2]["metrics"]} == {SCORE}
    assert {metric for metric, _ in compare(*runs, "--metrics", reward)[2]["metrics"]} == {reward}
    file.write_text(file.read_text().replace(f'"{reward}": 0.8', f'"{reward}": 0.7'))
    assert {metric for metric, _ in compare(*runs)[2]["metrics"]} == {SCORE, reward}


def test_bad_input_is_one_sentence(make, compare, tmp_path):
    run, late = make("a", [1.0]), make("b", [1.0], first=5, settings={"data": {"x": 1}})
    (empty := tmp_path / "empty").mkdir()
    (empty / "metrics.jsonl").write_text("")
    (broken := make("c", [1.0])).joinpath("config.yaml").write_text("a: [")
    for words, said in (
        ([run, tmp_path / "nothing"], "does not exist. Give the run folder"),
        ([run, empty], "has no step in its metrics.jsonl"),
        ([run, late], "a and b have no step in common"),
        ([run, run], "a run is named twice"),
        ([run, broken], "config.yaml cannot be read"),
        ([run], "is one run. Give two or more"),
    ):
        code, text, found = compare(*words)
        assert (code, found) == (2, None)
        assert text.startswith("error: ")
        assert said in text
        assert text.count("\n") == 1
