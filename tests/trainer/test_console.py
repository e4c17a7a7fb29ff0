import io
import logging
import re

import pytest
from rich.console import Console as Screen

from rltrain.common import logs
from rltrain.run.report.console import Console
from rltrain.trainer.metrics.timing import StepTimer

STEP = {
    "critic/score/mean": 0.5547,
    "reward/error_rate": 0.0,
    "actor/kl_loss": 0.00123,
    "response_length/mean": 212.5,
    "actor/entropy": 0.61,
    "perf/throughput": 1234.5,
    "actor/grad_norm": 1.5,
    "actor/pg_loss": -0.01,
    "actor/lr": 1e-6,
    "timing_s/step": 61.0,
}
VALIDATION = {
    "val-core/openai/gsm8k/acc/mean@4": 0.25,
    "val-core/openai/gsm8k/acc/best@4/mean": 0.5,
    "val-core/aime24/reward/mean@4": 0.0,
    "val-aux/openai/gsm8k/reward/mean@4": 0.3,
    "timing_s/testing": 3.0,
}


@pytest.fixture
def screen(monkeypatch):
    """A terminal of 80 columns; returns its output without control codes."""
    written = io.StringIO()
    monkeypatch.setattr(logs, "console", Screen(file=written, force_terminal=True, width=80, color_system=None))
    return lambda: re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())


def test_a_terminal_has_two_lines_of_80_columns(screen):
    console = Console(0, 6, shown=True)
    timer = StepTimer(console.phase)
    with timer("step"), timer("old_log_prob"):
        console.log(2, STEP)
        console._bar.refresh()
    console.close()
    lines = re.split(r"[\r\n]+", screen())
    assert "score=0.5547  kl=0.00123  length=212.5  entropy=0.61  tok/s/device=1234" in lines
    assert any(re.match(r"step 2/6 .*old_log_prob 0 s 0:04:04 left$", line) for line in lines), lines
    assert max(map(len, lines)) <= 80


def test_warnings_and_validation_stay_above_the_bar(screen, tmp_path):
    with logs.session():
        logs.open_train_log(tmp_path)
        console = Console(0, 6, shown=True)
        console.log(1, STEP)
        logging.getLogger("rltrain.x").warning("odd " * 40)
        console.log(2, STEP | VALIDATION)
        console.close()
    shown = screen()
    assert "warning: " + "odd " * 40 in shown
    assert "validation 2/6  val-core/openai/gsm8k/acc  mean@4=0.25  best@4/mean=0.5" in shown
    assert "validation 2/6  val-core/aime24/reward  mean@4=0" in shown
    assert "step 1/6  score" not in shown  # the bar has it
    assert re.search(r"^\S+ \S+ step 1/6  score=0.5547 ", (tmp_path / "train.log").read_text(), re.MULTILINE)


def test_elsewhere_a_step_is_one_line_with_its_time(capsys):
    with logs.session():
        console = Console(0, 6, shown=True)
        console.log(0, VALIDATION)
        console.log(3, STEP | {"reward/error_rate": 0.02, "timing_s/wall": 100.0})
        console.close()
    *validation, step = capsys.readouterr().out.splitlines()
    assert len(validation) == 2
    assert re.fullmatch(r"[\d -:]+ step 3/6  score=0.5547  reward_errors=0.02  kl=0.0.* step_s=61  left=0:05:00", step)


def test_without_the_console_steps_are_in_train_log_alone(capsys, tmp_path):
    with logs.session():
        logs.open_train_log(tmp_path)
        Console(0, 6, shown=False).log(1, STEP)
    assert "step 1/6" not in capsys.readouterr().out
    assert "step 1/6" in (tmp_path / "train.log").read_text()
