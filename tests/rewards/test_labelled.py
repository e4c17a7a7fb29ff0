"""Hand-labelled responses: the scorers agree with every label."""

import json
from pathlib import Path

import pytest

from rltrain.rewards.scorers import gsm8k
from rltrain.rewards.scorers.registry import find_scorer

FOLDER = Path(__file__).parent / "labelled"
SOURCES = {
    "gsm8k": "openai/gsm8k",
    "math": "lighteval/MATH",
    "dapo": "math_dapo",
    "boba": "boba",
    "geometry3k": "hiyouga/geometry3k",
    "virl39k": "TIGER-Lab/ViRL39K",
    "qa": "searchR1_nq",
    "clevr_count": "clevr_count_70k",
    "multiple_choice": "gpqa_diamond",
    "logicvista": "logicvista",
    "mathvista": "mathvista_mini",
    "visual_math": "mathvision_mini",
    "dynamath": "dynamath",
    "wemath": "wemath_mini",
}


def rows(name):
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def verdict(row, score):
    """Return the verdict of a row's scorer in the words of its label."""
    if not isinstance(score, dict):
        return {"score": score}
    return {"score": score["score"], "em": score["score"], "correct": score.get("acc"), **score}


@pytest.mark.parametrize("name", SOURCES)
def test_every_label_is_met(name):
    labelled = rows(name)
    assert len(labelled) >= 40
    wrong = []
    for row in labelled:
        extra_info = {"category": row.get("category"), **row.get("extra", {})}
        given = find_scorer(SOURCES[name])(row["answer"], row["truth"], extra_info)
        ruling = verdict(row, given)
        ruling |= {"strict": ruling["score"], "flexible": None}
        if name == "gsm8k":
            ruling["flexible"] = float(gsm8k.extract_answer(row["answer"], "flexible") == row["truth"].replace(",", ""))
        labels = {key: row[key] for key in row.keys() - {"answer", "truth", "category", "extra", "why", "recipe"}}
        if any(ruling[key] != pytest.approx(label, abs=1e-4) for key, label in labels.items()):
            wrong.append((row, {key: ruling[key] for key in labels}))
    assert not wrong, "\n".join(map(str, wrong))


# Right answers that count as wrong, known and left so: (answer, truth).
FALSE_WRONGS: set[tuple[str, str]] = set()


def verdicts():
    """Return every labelled pair of mathematics: its row, its label, and whether its scorer accepts it."""
    for row in rows("pairs") + rows("symbolic"):
        given = find_scorer(row["source"])(row["answer"], row["truth"], {})
        yield (
            row,
            row.get("right", row.get("correct")),
            bool(verdict(row, given).get("acc", verdict(row, given)["score"]) > 0),
        )


def test_no_wrong_answer_is_paid_and_every_right_one_that_is_not_is_known():
    false_rights = [row for row, label, right in verdicts() if right and not label]
    false_wrongs = {(row["answer"], str(row["truth"])) for row, label, right in verdicts() if label and not right}
    total = len(rows("pairs") + rows("symbolic"))
    print(f"{total} pairs: {len(false_rights)} false rights, {len(false_wrongs)} false wrongs")
    assert not false_rights, "\n".join(map(str, false_rights))
    assert false_wrongs == FALSE_WRONGS


@pytest.mark.parametrize(("name", "otherwise"), [("geometry3k", 11), ("virl39k", 11), ("clevr_count", 4)])
def test_answers_that_a_recipe_scores_otherwise_are_known(name, otherwise):
    marked = [row for row in rows(name) if "recipe" in row]
    label = "score" if name == "clevr_count" else "correct"
    assert len(marked) == otherwise  # examples/README.md has the numbers
    assert all(row["recipe"] != row[label] for row in marked)
    # Where it is the other way round, the answer is wrong.
    assert all(row["recipe"] == 0 or row["why"] for row in marked)


@pytest.mark.parametrize(
    "source", ["HuggingFaceH4/MATH-500", "hiyouga/geometry3k", "retool/aime25", "boba", "aime2024"]
)
def test_answers_of_mathematics_that_agree_vote_together(source):
    def votes(*answers):
        return {find_scorer(source)(f"Answer: \\boxed{{{answer}}}", "7", {})["pred"] for answer in answers}

    assert votes("0.5", "1/2", "\\frac12", "\\dfrac{2}{4}", ".50") == {"1/2"}
    assert votes("1,000", "1000", "1000.0") == {"1000"}
    assert votes("(1, 000)", "( 1,000 )") == {"(1,000)"}
    assert votes("x + 1", "x+1") == {"x+1"}
    assert find_scorer(source)("nothing", "7", {})["pred"] == ""


def test_f1_is_the_score_where_the_source_asks_for_it():
    given = find_scorer("qa_f1/mine")("<answer>New York</answer>", {"target": ["New York City"]}, {})
    assert given == {"score": pytest.approx(0.8), "acc": 0.0}
