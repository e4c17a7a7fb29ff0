import functools
import os
import signal
import socket

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.common.errors import RewardError, WorkerLost
from rltrain.data.rows import read_rows
from rltrain.rewards.processes.columns import columns_of
from rltrain.rewards.processes.score import Score
from tests.faults.plug import below, ended, pids

LENGTH = """
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        print("saw", solution_str)
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


def scores(ray, pool, *lists):
    """Return the columns for lists of (texts, rows, positions), or for one list of texts."""
    scoring = pool.begin_scoring("train", sum(len(rows) for _, rows, _ in lists))
    for texts, rows, positions in lists:
        scoring.add(ray.put(texts), np.array(rows), np.array(positions))
    return scoring.collect()


def scores_of(ray, pool, *texts):
    return scores(ray, pool, (list(texts), range(len(texts)), range(len(texts))))


def test_scores_come_back_in_job_order_with_the_built_in_scorer(local_ray, pool):
    made = pool()
    lists = [
        ([str(i + 1) for i in range(20)], range(20), range(20)),
        (["no", "3", "no", "5"], [4, 2, 1], [3, 1, 0]),
        ([], [], []),
    ]
    columns = scores(local_ray, made, *lists)
    assert columns["score"].tolist() == [1.0] * 20 + [1.0, 1.0, 0.0]
    assert columns["score"].dtype == np.float64
    assert columns["reward_failed"].tolist() == [0.0] * 23
    assert scores(local_ray, made)["score"].shape == (0,)


def test_failures_count_on_error_and_are_logged_with_what_was_printed(local_ray, pool, custom, caplog, tmp_path):
    made = pool(custom(LENGTH), log_file=tmp_path / "reward.log")
    made.score_truths("train")
    for _ in range(2):
        columns = scores_of(local_ray, made, "aaa", "crash", "b", "crash", "a", "c")
        assert columns["score"].tolist() == [1.0, -2.0, 3.0, -2.0, 5.0, 6.0]
        assert columns["reward_failed"].tolist() == [0, 1, 0, 1, 0, 0]
        assert not columns["reward_timeout"].any()
        np.testing.assert_array_equal(columns["scorer/acc"], [3, np.nan, np.nan, np.nan, 1, np.nan])
        assert columns["scorer/pred"].tolist() == ["aaa", "", "b", "", "a", "c"]
        assert ["no thanks" in error for error in columns["reward_error"]] == [False, True, False, True, False, False]
    text = (tmp_path / "reward.log").read_text()
    assert text.count(" worker 0: saw 1\n") == text.count(" worker 1: saw 1\n") == 1
    assert text.count(": saw aaa\n") == 2
    assert len(caplog.messages) == 1
    # Each of the two that crash may be scored first.
    truth = "ground truth: '4'" if "'4'" in caplog.messages[0] else "ground truth: '2'"
    for part in ("ValueError: no thanks", "my_reward.py", "answer: 'crash'", truth, "reward/error_rate"):
        assert part in caplog.messages[0]
        assert text.count(part) == 1


def test_an_answer_that_hangs_is_told_from_one_that_crashes(local_ray, pool, custom):
    code = "import signal\ndef compute_score(solution_str, **_): return signal.pause() if solution_str == 'hang' else 1"
    columns = scores_of(local_ray, pool(custom(code), timeout_s=1.0), "a", "hang", "b")
    assert (columns["reward_failed"][1], columns["reward_timeout"][1]) == (1, 1)
    assert "reward.timeout_s" in columns["reward_error"][1]


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
        scores_of(local_ray, made, "crash", "a", "crash", "crash")
    for part in ("more than half", "3 crashed", "ValueError: no thanks", "my_reward.py"):
        assert part in str(caught.value)
    assert scores_of(local_ray, made, "crash", "a")["reward_failed"].tolist() == [1, 0]


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


def test_killed_worker_is_named_and_its_process_ends(local_ray, pool, custom):
    made = pool(custom("import os\ndef compute_score(**kwargs): return os.getpid()"), num_workers=1)
    pid = int(made.score_truths("train")[0].value)
    (worker,) = (each for each in pids(os.getpid(), "ray::RewardWorker") if pid in below(each))
    started = [worker, *below(worker)]
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(WorkerLost) as caught:
        scores_of(local_ray, made, "1")
    assert str(caught.value) == (
        f"reward worker 0 of 1 (pid {worker} on {socket.gethostname()}), in scoring answers: the process is gone: "
        "killed, or memory ran out. Run the same command again."
    )
    ended(started)


def test_shutdown_leaves_no_process(local_ray, pool, custom):
    made = pool(custom("import os\ndef compute_score(**kwargs): return os.getpid()"))
    found = {int(pid) for pid in scores_of(local_ray, made, *"x" * 20)["score"]}
    assert len(found) == 2
    made.shutdown()
    ended(found)
