import contextlib
import io
import logging
import os
import subprocess
import sys
import warnings

import pytest
from rich.console import Console

from rltrain.base import logs

log = logging.getLogger("rltrain.run.fit")


def test_train_log_has_what_was_said_before_the_folder(tmp_path, capsys):
    with logs.session():
        log.info("reading data")
        logs.open_train_log(tmp_path)
        log.warning("hm")
        logging.getLogger("httpx").info("GET /")
        logs.STEPS.info("step 1/2")
    text = (tmp_path / "train.log").read_text()
    assert [line.split(" ", 2)[2] for line in text.splitlines()] == ["reading data", "warning: hm", "step 1/2"]
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 2)[2] for line in shown] == ["reading data", "warning: hm"]


def test_a_second_start_appends_behind_a_line(tmp_path):
    for text in ("one", "two"):
        with logs.session():
            log.info(text)
            logs.open_train_log(tmp_path)
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert lines[0].endswith("one")
    assert "started again" in lines[2]
    assert lines[3].endswith("two")


def test_train_log_tells_what_ended_the_run(tmp_path, capsys):
    def broken():
        with logs.session():
            logs.open_train_log(tmp_path)
            raise ZeroDivisionError("by nothing")

    with pytest.raises(ZeroDivisionError):
        broken()
    text = (tmp_path / "train.log").read_text()
    assert "error: by nothing" in text
    assert "in broken" in text
    assert "by nothing" not in capsys.readouterr().out  # main says it, once


def test_a_session_leaves_no_handler_behind(tmp_path):
    before = list(logging.getLogger().handlers)
    with logs.session(), logs.session():
        logs.open_train_log(tmp_path)
    assert logging.getLogger().handlers == before
    assert not logging.getLogger("rltrain").level


def test_python_warnings_are_in_train_log(tmp_path):
    with logs.session(), warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.open_train_log(tmp_path)
        warnings.warn("old key", UserWarning, stacklevel=1)
    assert "UserWarning: old key" in (tmp_path / "train.log").read_text()


def test_lines_stand_above_what_moves_and_are_not_cut(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(logs, "console", Console(file=screen, force_terminal=True, width=40))
    with logs.session(), logs.waiting("loading"):
        log.info("x" * 100)
    assert "x" * 100 in screen.getvalue()
    assert "loading" in screen.getvalue()


def test_a_worker_has_a_log_with_its_crash(tmp_path):
    code = (
        "import ctypes, logging, sys, warnings; from rltrain.base import logs; logs.open_worker_log(sys.argv[1], 17);"
        "logging.getLogger('rltrain.x').info('hello'); logging.getLogger('other').info('noise'); warnings.warn('odd');"
        "ctypes.string_at(0)"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path / "logs")], capture_output=True, check=False)
    assert process.returncode < 0
    text = (tmp_path / "logs" / "rank_00017.log").read_text()
    assert "rank 17: pid" in text
    assert "hello" in text
    assert "odd" in text
    assert "Segmentation fault" in text
    assert "noise" not in text


def test_a_worker_without_the_folder_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    before = list(logging.getLogger().handlers)
    logs.open_worker_log(str(tmp_path / "file" / "logs"), 0)
    assert logging.getLogger().handlers == before


def test_one_of_a_thing_is_singular():
    assert [logs.count(number, "worker") for number in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]


def test_what_is_said_does_not_steer_the_terminal(tmp_path, capsys):
    with logs.session():
        logs.open_train_log(tmp_path)
        logging.getLogger("rltrain.rewards").warning("ValueError: no number in %s", "\x1b]0;title\x07")
    assert "\x1b" not in capsys.readouterr().out + (tmp_path / "train.log").read_text()


@pytest.mark.fault("Standard output that is full, or a pipe whose reader is gone, ends no run")
@pytest.mark.parametrize("output", ["/dev/full", "pipe"])
def test_output_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch, output):
    if output == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(output, os.O_WRONLY)
    stream = io.TextIOWrapper(os.fdopen(writer, "wb", 0), write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    with logs.session():
        logs.open_train_log(tmp_path)
        with logs.waiting("reading data"):
            print("from a callback")
        log.warning("hm")
    assert sys.stdout is stream
    with contextlib.suppress(OSError):
        stream.close()
    assert "hm" in (tmp_path / "train.log").read_text()


def test_a_line_of_a_signals_handler_in_the_middle_of_another_ends_nothing(tmp_path):
    """Python's buffer refuses to be entered twice, and a handler may run wherever the main thread is."""

    class Raw(io.FileIO):
        def write(self, data):
            if not told:
                told.append(output.write("from the handler\n"))
                output.flush()
            return super().write(data)

    told = []
    with io.TextIOWrapper(io.BufferedWriter(Raw(tmp_path / "out", "w"))) as stream:
        output = logs._Output(stream)
        output.write("a line of the run\n")
        output.flush()
    assert told
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["a line of the run", "from the handler"]


@pytest.mark.parametrize("encoding", ["gbk", "ascii", "latin-1"])
def test_a_terminal_that_lacks_a_sign_ends_nothing(tmp_path, monkeypatch, encoding):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding=encoding, write_through=True))
    with logs.session():
        logs.open_train_log(tmp_path)
        with logs.waiting("reading \U0001f600 in [/red]"):
            print("\U0001f600 from a callback")
        log.info("47+9=? -> \ufdfa \ud83d :smile: \u2717")
    assert r"47+9=? -> \ufdfa" in shown.getvalue().decode(encoding)
    assert r"\U0001f600 from a callback" in shown.getvalue().decode(encoding)
    text = (tmp_path / "train.log").read_text("utf-8")
    assert "47+9=? -> \ufdfa \ufffd :smile: \u2717" in text


def test_programs_show_what_their_terminal_lacks_as_an_escape():
    code = "from rltrain.base.errors import command\n@command\ndef main(argv):\n    print('\\u2717 \\u4e00')\nmain([])"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, rb"\u2717 \u4e00")


def test_a_sign_that_a_moved_stream_lacks_is_an_escape(tmp_path):
    """Python refuses to set a stream anew whose descriptor was a file and leads into a pipe since."""
    code = (
        "import os, sys; read, write = os.pipe(); os.dup2(write, 1); from rltrain.base.errors import lenient_output; "
        "lenient_output(); print('\\u2717'); sys.stderr.write(os.read(read, 9).decode())"
    )
    with open(tmp_path / "out", "w") as file:
        file.write("before\n")
        file.flush()
        command, variables = [sys.executable, "-c", code], os.environ | {"PYTHONIOENCODING": "ascii"}
        process = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, env=variables)
    assert (process.returncode, process.stderr) == (0, "\\u2717\n")
