"""What scorers print and how they fail: kept, bounded, and told once."""

import logging
import os

import pytest

from rltrain.rewards.processes import log as reward_log
from rltrain.rewards.processes.log import RewardLog
from rltrain.rewards.processes.score import Score
from rltrain.rewards.processes.slot import ScoringSlot

CALL = ("any/source", "an answer", "42", {})


def test_prints_logs_and_output_of_c_and_children_are_kept(slot):
    body = """
        import ctypes, logging, os, sys, warnings
        print('by print: é \\ud800')
        sys.stderr.write('by stderr\\n')
        logging.getLogger('judge').info('by logging')
        ctypes.CDLL(None).printf(b'by C\\n')
        os.system('echo by a child')
        warnings.warn('by warnings')
        return 1
    """
    made = slot(body)
    assert made.score(*CALL).value == 1.0
    printed = made.take_printed()
    for line in ("by print: é \\ud800", "by stderr", "by logging", "by C", "by a child", "UserWarning: by warnings"):
        assert line in printed
    assert made.take_printed() == ""


@pytest.mark.parametrize("body", ["while True: pass", "import os; os._exit(3)", "import ctypes; ctypes.string_at(0)"])
def test_what_was_printed_before_the_process_ended_is_kept(slot, body):
    made = slot(f"print('last words')\n{body}", timeout_s=0.5)
    assert made.score(*CALL).status != "ok"
    assert made.take_printed() == "last words\n"
    made.score(*CALL)
    made.close()
    assert made.take_printed() == "last words\n"


def test_a_flood_is_cut_and_counted_and_meets_its_deadline(slot):
    made = slot("import os\nif solution_str == 'good': return 1\nwhile True: os.write(1, b'x' * 65536)", timeout_s=0.5)
    assert made.score(*CALL).status == "timeout"
    printed = made.take_printed()
    assert len(printed) < 300_000
    assert "more bytes were printed here and are left out" in printed
    assert made.score("s", "good", "", {}).value == 1.0
    assert made.take_printed() == ""


def test_a_child_that_goes_on_printing_delays_no_answer(slot):
    made = slot(
        "import subprocess\nif solution_str == 'bad': subprocess.Popen(['yes'])\nreturn len(solution_str)", timeout_s=5
    )
    assert [made.score("s", text, "", {}).value for text in ("bad", "good")] == [3.0, 4.0]


def test_a_function_may_set_up_its_own_logging(slot):
    body = """
        import logging
        logging.basicConfig(level=logging.DEBUG, format='mine %(message)s')
        logging.getLogger('judge').debug('a detail')
        return 1
    """
    made = slot(body)
    made.score(*CALL)
    assert made.take_printed() == "mine a detail\n"


@pytest.mark.fault("A scorer that is killed between two answers costs none")
def test_a_scorer_that_died_between_two_answers_costs_none(slot, gone):
    made = slot("return 1")
    assert made.score(*CALL).value == 1.0
    os.kill(made.pid, 9)
    assert gone(made.pid)
    assert made.score(*CALL) == Score(1.0, "ok")
    assert "SIGKILL\nbetween two answers" in made.take_printed()


def test_an_answer_that_failed_says_what_it_was(slot):
    score = slot("raise KeyError('x')").score("a/source", "y" * 1000, {"target": ["1"]}, {})
    assert (score.status, score.kind) == ("crashed", "KeyError")
    for part in (
        "data_source='a/source'",
        "yyy",
        "(1,000 characters)",
        "{'target': ['1']}",
        "my_reward.py",
        "KeyError",
    ):
        assert part in score.report()
    assert len(score.report()) < 1500


def test_the_first_failure_of_every_kind_is_told_once(caplog, tmp_path):
    file = tmp_path / "reward.log"
    log = RewardLog(file)
    failures = [
        Score(None, status, f"{kind} {number}", kind=kind).about((source, "answer", "truth", {}))
        for number in range(3)
        for source in ("a", "b")
        for status, kind in (("crashed", "ValueError"), ("crashed", "KeyError"), ("timeout", ""))
    ]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            log.failures([Score(1.0, "ok"), *failures])
    assert len(caplog.messages) == 6
    assert all(word in caplog.messages[0] for word in ("data_source='a'", "'answer'", "'truth'", "ValueError 0"))
    assert file.read_text().count("ValueError 0") == 2


def test_the_log_is_bounded_and_survives_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(reward_log, "MAX_FILE_BYTES", 1000)
    file = tmp_path / "reward.log"
    log = RewardLog(file)
    for number in range(100):
        log.printed("worker 0", f"line {number}\nsecond")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    assert {path.name for path in tmp_path.iterdir()} == {"reward.log", "reward.1.log"}
    assert file.read_text().splitlines()[-2].endswith(" worker 0: line 99")
    RewardLog(tmp_path / "no such folder/reward.log").printed("worker 0", "lost")


def test_an_async_function_is_awaited_and_keeps_its_loop(custom):
    code = """
        import asyncio
        loops = set()
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(60 if solution_str == 'hang' else 0)
            if solution_str == 'bad':
                raise ValueError('not this one')
            return {'score': len(solution_str), 'loops': len(loops)}
    """
    with ScoringSlot(custom(code), timeout_s=1.0) as made:
        assert [made.score("s", text, "", {}).value for text in ("a", "bb")] == [1.0, 2.0]
        assert made.score("s", "ccc", "", {}).extras == {"loops": 1.0}
        bad = made.score("s", "bad", "", {})
        assert (bad.status, bad.kind) == ("crashed", "ValueError")
        assert "my_reward.py" in bad.error
        assert made.score("s", "hang", "", {}).status == "timeout"
        assert made.score("s", "a", "", {}).value == 1.0


def test_a_reward_file_sees_its_neighbours_and_hides_no_package(custom, tmp_path):
    (tmp_path / "my_rules.py").write_text("def rate(text): return len(text)")
    (tmp_path / "numpy.py").write_text("raise RuntimeError('the wrong numpy')")
    code = """
        import sys
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            import numpy
            from my_rules import rate
            return numpy.float32(rate(solution_str))
    """
    with ScoringSlot(custom(code)) as made:
        assert made.score(*CALL).value == 9.0


def test_a_check_tries_the_usual_forms_where_the_truth_fails(slot):
    picky = slot("return len(solution_str.split('#### ')[1])")
    assert picky.score_truth(("s", "42", "42", {})).value == 2.0
    assert slot("return None").score_truth(("s", "42", "42", {})).status == "rejected"
