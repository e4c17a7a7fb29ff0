import functools
import os
import re
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.base.errors import RewardError, WorkerLost
from rltrain.data.rows import read_rows
from rltrain.rewards.processes.columns import columns_of
from rltrain.rewards.processes.score import Score

LENGTH = """
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "hang":
            while True: pass
        if solution_str == "crash":
            raise ValueError("no thanks")
        extras = {"acc": len(solution_str)} if solution_str.startswith("a") else {}
        return {"score": float(ground_truth), "pred": solution_str, **extras}
"""


@pytest.fixture
def rows(tmp_path):
    records = [
        {
            "data_source": "rltrain/arithmetic",
            "prompt": [{"role": "user", "content": f"{i}+1=?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        }
        for i in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet")
    return read_rows(str(tmp_path / "rows.parquet"))


@pytest.fixture
def pool(pool, rows):
    return functools.partial(pool, rows)


def scores(ray, pool, texts, rows, positions=None):
    """The columns of these answers, in one list of texts."""
    return scores_of_lists(pool, [(ray.put(texts), rows, range(len(rows)) if positions is None else positions)])


def scores_of_lists(pool, lists):
    scoring = pool.begin_scoring("train", sum(len(rows) for _, rows, _ in lists))
    for texts, rows, positions in lists:
        scoring.add(texts, np.array(rows), np.array(positions))
    return scoring.collect()


def test_scores_come_back_in_job_order_with_the_built_in_scorer(local_ray, pool):
    made = pool()
    lists = [
        (local_ray.put([str(i + 1) for i in range(20)]), range(20), range(20)),
        (local_ray.put(["no", "3", "no", "5"]), [4, 2, 1], [3, 1, 0]),
        (local_ray.put([]), [], []),
    ]
    columns = scores_of_lists(made, lists)
    assert columns["score"].tolist() == [1.0] * 20 + [1.0, 1.0, 0.0]
    assert columns["score"].dtype == np.float64
    assert columns["reward_failed"].tolist() == [0.0] * 23
    assert scores_of_lists(made, [])["score"].shape == (0,)


def test_answers_are_fetched_by_the_workers_not_by_the_driver(local_ray, pool, monkeypatch):
    made = pool()
    texts = local_ray.put(["1" * 100_000, "2"])
    fetched = []
    get = local_ray.get
    monkeypatch.setattr(local_ray, "get", lambda ref, **options: fetched.append(ref) or get(ref, **options))
    assert scores_of_lists(made, [(texts, [0, 1], [0, 1])])["score"].tolist() == [0.0, 1.0]
    assert texts not in fetched


def test_failures_count_on_error_and_are_shown(local_ray, pool, custom):
    made = pool(custom(LENGTH))
    columns = scores(local_ray, made, ["aaa", "hang", "b", "crash", "a", "c"], [0, 1, 2, 3, 4, 5])
    assert columns["score"].tolist() == [1.0, -2.0, 3.0, -2.0, 5.0, 6.0]
    assert columns["reward_failed"].tolist() == [0, 1, 0, 1, 0, 0]
    assert columns["reward_timeout"].tolist() == [0, 1, 0, 0, 0, 0]
    np.testing.assert_array_equal(columns["scorer/acc"], [3, np.nan, np.nan, np.nan, 1, np.nan])
    assert columns["scorer/pred"].tolist() == ["aaa", "", "b", "", "a", "c"]
    assert ["reward.timeout_s" in columns["reward_error"][1], columns["reward_error"][2]] == [True, ""]


def test_no_number_of_a_scorer_has_the_name_of_a_column_of_ours():
    names = ("score", "reward_failed", "reward_timeout", "response_length")
    columns = columns_of([Score(1.0, "ok", None, dict.fromkeys(names, 9.0))], on_error=0.0)
    ours = {"score": [1.0], "reward_failed": [0.0], "reward_timeout": [0.0]}
    assert {name: values.tolist() for name, values in columns.items()} == ours | {
        f"scorer/{name}": [9.0] for name in names
    }


def test_a_mostly_failing_batch_stops_with_the_first_traceback(local_ray, pool, custom):
    made = pool(custom(LENGTH), num_workers=1)
    with pytest.raises(RewardError) as caught:
        scores(local_ray, made, ["crash", "a", "crash", "crash"], [0, 1, 2, 3])
    for part in ("more than half", "3 crashed", "ValueError: no thanks", "my_reward.py"):
        assert part in str(caught.value)
    assert scores(local_ray, made, ["crash", "a"], [0, 1])["reward_failed"].tolist() == [1, 0]


def test_check_finds_a_broken_reward_file_before_training(pool, custom):
    with pytest.raises(RewardError) as caught:
        pool(custom("import no_such_module_anywhere")).score_truths("train")
    assert "No module named 'no_such_module_anywhere'" in str(caught.value)
    assert "ray::" not in str(caught.value)


def test_check_scores_the_ground_truth_as_the_answer(pool, custom):
    made = pool()
    assert [score.value for score in made.score_truths("train")] == [1.0]
    assert [score.value for score in made.score_truths("train", [3, 4])] == [1.0, 1.0]
    zero = pool(custom("def compute_score(**kwargs): return 0"), num_workers=1)
    assert zero.score_truths("train")[0].value == 0.0
    sometimes = (
        "def compute_score(ground_truth, **kwargs):\n    if ground_truth == '1': raise ValueError('bare')\n    return 1"
    )
    assert [score.status for score in pool(custom(sometimes)).score_truths("train", [0, 1])] == ["crashed", "ok"]


@pytest.mark.parametrize(
    ("body", "said"), [("raise ValueError('always')", "ValueError: always"), ("return", "NoneType None")]
)
def test_a_function_that_fails_on_every_trial_row_stops_at_once(pool, custom, caplog, body, said):
    made = pool(custom(f"def compute_score(**kwargs): {body}"), num_workers=1)
    with pytest.raises(RewardError) as caught:
        made.score_truths("train", [0, 1])
    for part in (
        "compute_score",
        "my_reward.py",
        said,
        "data_source='rltrain/arithmetic'",
        "ground truth: '1'",
        "rewards.try",
    ):
        assert part in str(caught.value)
    assert not caplog.messages


def test_prints_and_the_first_failures_are_in_the_log(local_ray, pool, custom, caplog, tmp_path):
    code = LENGTH.replace('if solution_str == "hang"', 'print("saw", solution_str)\n        if solution_str == "hang"')
    made = pool(custom(code), log_file=tmp_path / "reward.log")
    made.score_truths("train")
    for _ in range(2):
        scores(local_ray, made, ["aaa", "crash", "b", "crash", "a", "c"], [0, 1, 2, 3, 4, 5])
    text = (tmp_path / "reward.log").read_text()
    assert text.count(" worker 0: saw 1\n") == text.count(" worker 1: saw 1\n") == 1
    assert text.count(": saw aaa\n") == 2
    assert len(caplog.messages) == 1
    # Each of the two that crash may be scored first.
    truth = "ground truth: '4'" if "'4'" in caplog.messages[0] else "ground truth: '2'"
    for part in ("ValueError: no thanks", "my_reward.py", "answer: 'crash'", truth, "reward/error_rate"):
        assert part in caplog.messages[0]
        assert text.count(part) == 1


def wait_until_gone(pids):
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_killed_worker_is_told_and_takes_its_process_along(local_ray, pool, custom):
    made = pool(custom("import os\ndef compute_score(**kwargs): return os.getpid()"), num_workers=1)
    pid = int(made.score_truths("train")[0].value)
    reaper = parent_of(pid)
    worker = parent_of(reaper)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(WorkerLost) as caught:
        scores(local_ray, made, ["1"], [0])
    assert str(caught.value) == (
        f"reward worker 0 of 1 (pid {worker} on {socket.gethostname()}), in scoring answers: the process is gone: "
        "killed, or memory ran out. Run the same command again."
    )
    wait_until_gone([pid, reaper])


def parent_of(pid):
    return int(re.search(r"PPid:\t(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def test_shutdown_leaves_no_process(local_ray, pool, custom):
    made = pool(custom("import os\ndef compute_score(**kwargs): return os.getpid()"))
    pids = {int(pid) for pid in scores(local_ray, made, ["x"] * 20, range(20))["score"]}
    assert len(pids) == 2
    made.shutdown()
    wait_until_gone(pids)
