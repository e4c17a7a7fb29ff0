"""``python -m rltrain.rewards.try``: verdicts of a reward function, in this process."""

import json
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.tools.try_reward import main

REWARD = """
    from my_rule import last

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):
        print("looking at", solution_str)
        if "[" in solution_str:
            raise KeyError("no brackets")
        if "answer>" in solution_str:
            return None
        return {"score": scale * float(last(solution_str) == ground_truth), "pred": last(solution_str)}
"""


@pytest.fixture
def attempt(tmp_path, monkeypatch, capsys):
    """Run the command on five rows of two data sources; return its exit code and output."""
    (tmp_path / "my_reward.py").write_text(textwrap.dedent(REWARD))
    (tmp_path / "my_rule.py").write_text("def last(text):\n    return text.split()[-1]\n")
    truth = {"style": "rule", "ground_truth": "4711"}
    prompt = [{"role": "user", "content": "?"}]
    sources = ["one", "one", "one", "one", "two"]
    records = [{"data_source": source, "prompt": prompt, "reward_model": truth} for source in sources]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet")
    monkeypatch.syspath_prepend(str(tmp_path))  # and the path is as before afterwards

    def run(*more, reward=tmp_path / "my_reward.py"):
        code = main([str(reward), str(tmp_path / "rows.parquet"), *map(str, more)])
        monkeypatch.delitem(sys.modules, "my_rule", raising=False)
        written = capsys.readouterr()
        return code, written.out + written.err

    return run


def lines_of(written, answer):
    return [line for line in written.splitlines() if f" {answer} " in line and "│" in line]


def test_usual_forms_and_a_wrong_answer_are_tried_per_source(attempt):
    code, written = attempt("--rows", 1, "--kwargs", "scale=2.5")
    assert code == 2
    assert [line.split("│")[1:3] for line in lines_of(written, "#### 4711")] == [
        [" 0   ", " one         "],
        [" 4   ", " two         "],
    ]
    assert all(" 2.5 " in line and " pred=4711 " in line for line in lines_of(written, "#### 4711"))
    assert all(" 0 " in line for line in lines_of(written, "I do not know."))
    assert "looking at #### 4711" in written
    assert written.count("KeyError: 'no brackets'") == 1
    assert written.count("returned NoneType None") == 1
    assert "my_reward.py" in written
    assert "try_reward.py" not in written


@pytest.mark.parametrize("page", ["README.md", "docs/plugins.md", "ground_truth in solution_str"])
def test_a_list_of_guesses_is_tried_and_earns_nothing_from_the_examples_of_the_docs(attempt, tmp_path, page):
    body = f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return float({page})\n"
    if page.endswith(".md"):
        text = (Path(__file__).parents[2] / page).read_text()
        body = next(block for block in text.split("```") if block.startswith("python\n# reward.py")).removeprefix(
            "python"
        )
    (tmp_path / "example.py").write_text(body)
    code, written = attempt("--rows", 1, reward=tmp_path / "example.py")
    pays = not page.endswith(".md")
    assert (code, lines_of(written, "1 4711 2 3 4")[0].split("│")[5].strip()) == (0, "1" if pays else "0")
    assert ("row 0, response '1 4711 2 3 4' earned 1: it contains the ground truth among" in written) == pays


@pytest.mark.parametrize("name", ["answers.txt", "answers.jsonl"])
def test_answers_of_a_file_are_tried_on_their_rows(attempt, tmp_path, name):
    texts = ["4711", "no", "it is 4711"]
    lines = (
        texts
        if name.endswith("txt")
        else [json.dumps(texts[0]), *(json.dumps({"answer": text, "row": 4}) for text in texts[1:])]
    )
    (tmp_path / name).write_text("\n".join(lines))
    code, written = attempt("--answers", tmp_path / name)
    assert code == 0
    rows = ["0", "1", "2"] if name.endswith("txt") else ["0", "4", "4"]
    for row, text, score in zip(rows, texts, ("1", "0", "1"), strict=True):
        cells = [[cell.strip() for cell in line.split("│")] for line in lines_of(written, text)]
        assert [row, text, score] in [[cell[1], cell[3], cell[5]] for cell in cells]


def test_try_errors_are_one_line_with_exit_code_2(attempt, tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"text": "4711"}')
    for more, said in (
        (["--name", "other"], "has no function"),
        (["--answers", tmp_path / "answers.jsonl"], "A line is a text"),
        (["--answers", tmp_path / "none.txt"], "none.txt"),
    ):
        code, written = attempt(*more)
        assert code == 2
        assert written.startswith("error: ")
        assert said in written
        assert "Traceback" not in written


def test_a_judge_is_tried_like_a_function(attempt, double):
    judge = double(lambda message, _: "\\boxed{yes}" if "4711" in message.split("graded:")[1] else "Who knows?")
    code, text = attempt("--rows", "0", "--kwargs", f"url={judge.url}", "model=grader", reward="judge")
    assert code == 2
    assert text.count("rejected: it does not end with yes, no or a number from 0 to 1") == 1
    assert "judge: calls 20, parse_failures 6, retries 4, seconds" in text
    assert "tokens 200" in text
    code, text = attempt("--kwargs", "model=grader", reward="judge")
    assert code == 2
    assert "a judge needs --kwargs url=" in text
