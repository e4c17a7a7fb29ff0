"""Prints and failures of scorers: they are saved, bounded, and logged once."""

import logging

from rltrain.rewards.processes.log import PrintLog, RewardLog
from rltrain.rewards.processes.score import Score

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
        logging.basicConfig(level=logging.DEBUG, format='mine %(message)s')
        logging.getLogger('judge').debug('a detail')
        return 1
    """
    made = slot(body)
    assert made.score(*CALL).value == 1.0
    printed = made.take_printed()
    for line in ("by print: é \\ud800", "by stderr", "by logging", "by C", "by a child", "UserWarning: by warnings"):
        assert line in printed
    assert "mine a detail\n" in printed, "a function may set up its own logging"
    assert made.take_printed() == ""


def test_the_first_failure_of_every_kind_is_logged_once(caplog, tmp_path):
    file = tmp_path / "reward.log"
    log = RewardLog(file)
    failures = [
        Score(None, status, f"{kind} {number}", kind=kind).with_call((source, "answer", "truth", {}))
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


def test_the_log_is_bounded_and_survives_a_full_disk(tmp_path):
    file = tmp_path / "reward.log"
    log = PrintLog(file, max_bytes=1000)
    for number in range(100):
        log.append("worker 0", f"line {number}\nsecond")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    assert {path.name for path in tmp_path.iterdir()} == {"reward.log", "reward.1.log"}
    assert file.read_text().splitlines()[-2].endswith(" worker 0: line 99")
    RewardLog(tmp_path / "no such folder/reward.log").append("worker 0", "lost")
