"""From saved samples to numbers, tables and a page."""

import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.common.errors import ConfigError, DataError
from rltrain.tools.evaluate.evaluation import summary
from rltrain.tools.evaluate.page import write_page
from rltrain.tools.evaluate.paired import differences
from rltrain.tools.evaluate.report import show
from rltrain.tools.evaluate.results import ResultFolder


def answers(source="a", rights=((1, 0), (1, 1), (0, 0)), first_row=0, **columns):
    """Return two responses to each of some prompts."""
    right = np.array(rights, dtype=float).ravel()
    number = len(right)
    frame = {
        "data_source": source,
        "row": np.repeat(np.arange(number // 2) + first_row, 2),
        "sample": np.tile([0, 1], number // 2),
        "reward": right,
        "reward_failed": 0.0,
        "response_length": np.arange(number) + 1,
        "finish_reason": ["length", *["stop"] * (number - 1)],
    }
    return pd.DataFrame(frame | columns)


def values(part):
    return {name: figure["value"] for name, figure in part["figures"].items()}


def result(name, step=None, frame=None):
    return summary(answers() if frame is None else frame) | {"model": {"name": name, "step": step}}


def test_figures_of_a_source_are_those_of_its_prompts():
    found = summary(answers())
    assert values(found["sources"]["a"]) == pytest.approx(
        {"avg@2": 0.5, "pass@1": 0.5, "pass@2": 2 / 3, "length": 3.5, "truncated": 1 / 6, "failed": 0}
    )
    assert found["notes"] == ["a: no maj@k, as its scorer returns no pred, or found an answer in no text"]
    figure = found["sources"]["a"]["figures"]["avg@2"]
    assert figure["low"] < figure["value"] < figure["high"]


def test_an_answer_that_could_not_be_scored_is_not_taken_for_wrong():
    found = summary(answers(reward_failed=[0, 1, 0, 0, 0, 0], agent_failed=["", "", "", "", "gone", ""]))
    assert values(found["sources"]["a"])["avg@2"] == pytest.approx((1 + 1 + 0) / 3)
    assert values(found["sources"]["a"])["failed"] == pytest.approx(2 / 6)
    assert (
        "2 of 6 responses could not be scored and are excluded; with 0 for each the mean would be 0.5"
        in found["notes"][1]
    )


def test_a_majority_needs_extracted_answers_and_a_pass_needs_right_or_wrong():
    found = summary(answers(pred=["4", "5", "4", "4", "6", "6"], acc=[0.5, 0, 1, 1, 0, 0]))
    assert found["sources"]["a"]["measure"] == "acc"
    assert values(found["sources"]["a"])["maj@2"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert found["notes"] == ["a: no pass@k, as acc is not only 0 or 1"]


def test_the_average_is_over_sources_and_the_order_of_rows_does_not_matter():
    both = pd.concat([answers(), answers("b", ((1, 1),), first_row=3)])
    found = summary(both)
    assert found["average"]["avg@2"]["value"] == 0.75
    assert summary(both.sample(frac=1, random_state=0).sort_values("data_source")) == found


def test_what_is_missing_is_what_no_part_has(tmp_path):
    kept = ResultFolder(tmp_path, {})
    assert [rows.tolist() for rows in kept.missing(5, 2)] == [[0, 1], [2, 3], [4]]
    for rows in (np.array([2, 3], np.int32), np.array([0], np.int32)):
        file = kept.part(rows)
        file.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"row": rows, **({"acc": [1.0]} if len(rows) == 1 else {})}), file)
    (tmp_path / "parts" / ".rows_000004_000004.parquet.tmp").write_text("half", encoding="utf-8")
    assert [rows.tolist() for rows in kept.missing(5, 2)] == [[1], [4]]
    joined = pd.read_parquet(kept.join(7))
    assert joined["row"].tolist() == [0, 2, 3]
    assert joined["acc"].isna().tolist() == [False, True, True]
    pq.write_table(pa.table({"row": np.array([1], np.int32), "acc": ["none"]}), kept.part(np.array([1], np.int32)))
    # a number in one file, a text in the other
    assert pd.read_parquet(kept.join(7))["acc"].tolist()[:2] == ["1", "none"]
    kept.part(np.array([1], np.int32)).write_text("no table", encoding="utf-8")
    with pytest.raises(DataError, match="a file that cannot be read"):
        kept.join(7)


def test_another_evaluation_of_the_folder_is_refused_by_what_differs(tmp_path):
    ResultFolder(tmp_path, {"model": "a", "n": 4, "top_p": 1.0}).begin()
    ResultFolder(tmp_path, {"model": "a", "n": 4, "top_p": 1.0}).check()
    with pytest.raises(ConfigError, match=r"another evaluation \(model; n: 4 then, 8 now\)\. Use these settings"):
        ResultFolder(tmp_path, {"model": "b", "n": 8, "top_p": 1.0}).check()


def test_a_model_is_a_column_of_statistics_and_several_are_rows(capsys):
    show([result("base")])
    alone = capsys.readouterr().out
    assert "│ pass@2" in alone
    assert "50.0 % [" in alone
    show([result("base"), result("step_10")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in lines] == ["base", "step_10"]


def test_two_models_are_compared_prompt_by_prompt(capsys):
    """B is better on a quarter of the prompts. 39 prompts are too long for A, and its row numbers differ."""
    rights = np.tile([[0, 0], [1, 1]], (60, 1))
    questions = {"question": np.repeat(np.arange(120).astype(str), 2), "ground_truth": "1"}
    first = pd.concat([answers(rights=rights, **questions), answers("b", ((1, 0),), question="x", ground_truth="1")])
    better = answers(rights=np.maximum(rights, np.arange(120)[:, None] % 4 == 0), **questions)[78:]
    other = pd.concat([better.assign(row=better["row"] - 39), answers("b", ((0, 0),), question="x", ground_truth="1")])
    results = [result("A", frame=first), result("B", frame=other)]
    (found,) = differences(results, [first, other.sample(frac=1, random_state=0)])
    assert (found["model"], found["minus"], found["sources"]["a"]["prompts"]) == ("B", "A", 81)
    figure = found["sources"]["a"]
    assert figure["value"] == pytest.approx(20 / 81)
    # The standard error of a share of 20 / 81; the scores themselves vary by 0.5 between prompts.
    assert figure["high"] - figure["low"] == pytest.approx(2 * 1.96 * np.sqrt(20 / 81 * 61 / 81 / 81), rel=0.1)
    assert found["average"]["value"] == pytest.approx((20 / 81 - 0.5) / 2)
    show(results, [found])
    told = capsys.readouterr().out.splitlines()
    assert [line for line in told if line.startswith("B - A (a): 24.7 points [") and line.endswith("by prompt (81)")]
    assert "B - A (b): -50.0 points [-50.0, -50.0], paired by prompt (1)" in told


def test_the_page_has_means_and_pass_at_k(tmp_path):
    two_sources = [result("a", 1, pd.concat([answers("x"), answers("y", first_row=3)])), result("b", 5)]
    write_page(tmp_path / "evaluation.html", two_sources)
    page = (tmp_path / "evaluation.html").read_text(encoding="utf-8")
    assert page.count("data-root-id") == 2
    assert not re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=", page)  # it opens offline
    assert [file.name for file in tmp_path.iterdir()] == ["evaluation.html"]
