"""`rltrain watch`: the view on a terminal, and log lines elsewhere."""

import json

import pytest
from rich.console import Console

from rltrain.common.clock import Clock
from rltrain.tools.watch import follow, is_over, main, view


def write_lines(file, lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"total_steps": 4}))
    (folder / "train.log").write_text(
        "2026-01-01 00:00:00,000 loading the model\n2026-01-01 00:00:01,000 warning: the disk is slow\n"
    )
    return folder


def with_steps(folder, *steps):
    metrics = {"critic/score/mean": 0.5, "timing_s/step": 10.0, "timing_s/wall": 20.0}
    write_lines(folder / "metrics.jsonl", [{"step": step, **metrics} for step in steps])


def on_screen(folder):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(view(folder))
        return console.export_text()


def test_a_terminal_shows_step_numbers_warnings_and_the_time_left(run):
    assert "loading the model" not in on_screen(run)  # the newest line is the warning
    assert "warning: the disk is slow" in on_screen(run)
    with_steps(run, 1, 2)
    text = on_screen(run)
    assert "mine: step 2 of 4" in text
    assert "0:00:40 left" in text
    assert "score=0.5" in text
    with_steps(run, 1, 2, 3, 4)
    assert "all steps are done" in on_screen(run)


class Writer(Clock):
    """Appends the next text to the log at each sleep."""

    def __init__(self, log, *texts):
        self.log, self.texts = log, iter(texts)

    def sleep(self, seconds):
        with self.log.open("a") as file:
            file.write(next(self.texts))


def test_elsewhere_the_log_is_followed_until_the_last_step(run):
    written, told = [], iter([False, False, True])
    follow(run, written.append, lambda: next(told), Writer(run / "train.log", "more\n", "more\n"))
    assert [line.rpartition(" ")[2] for line in "".join(written).splitlines()] == ["model", "slow", "more", "more"]


def test_a_line_that_is_half_written_is_shown_once_it_is_whole(run):
    written, told = [], iter([False, False, True])
    follow(run, written.append, lambda: next(told), Writer(run / "train.log", "half of", " a line\nand an\x0bend"))
    assert "".join(written).splitlines()[2:] == ["half of a line", "and an", "end"]


def test_a_run_is_over_when_the_steps_of_its_plan_are_made(run):
    assert not is_over(run)
    with_steps(run, 1, 2, 3)
    assert not is_over(run)
    with_steps(run, 1, 2, 3, 4)
    assert is_over(run)
    (run / "plan.json").unlink()
    assert not is_over(run)


def test_bad_arguments_are_one_sentence(run, tmp_path, capsys):
    for words, said in (([tmp_path / "none"], "is not a folder"), ([run, "--serve"], f"`rltrain report {run} --html`")):
        assert main([*map(str, words)]) == 2
        assert said in capsys.readouterr().err
