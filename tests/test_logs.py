import contextlib
import importlib
import io
import json
import logging
import os
import re
import subprocess
import sys

import pytest
from rich.text import Text

from rltrain import __main__ as program_of_all
from rltrain.commands import COMMANDS
from rltrain.common import logs
from rltrain.common.errors import DataError, command, lenient_output, sanitize
from rltrain.common.secrets import masked_text

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


def test_a_worker_has_a_log_with_its_crash(tmp_path):
    code = (
        "import ctypes, logging, sys, warnings; from rltrain.common import logs; logs.open_worker_log(sys.argv[1], 17);"
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


def test_no_command_writes_a_sequence_that_steers_the_terminal(capsys):
    """This includes rich, whose own colours stay, and output inside a session."""
    hostile = "a\x1b]52;c;x\x07\x9b2J\x1b[31m\r\x08\u202e\u2066b\u2028c\x00"

    @command
    def program(argv):
        with logs.session():
            sys.stdout.write(hostile)
            logs.SanitizedConsole(force_terminal=True, width=200).print(Text(hostile, style="red"))
        print(hostile)
        sys.stdout.writelines([hostile])
        raise DataError(hostile)

    assert program([]) == 2
    written = capsys.readouterr()
    assert "\x1b[31ma" in written.out, "rich's colour"
    shown = written.err + re.sub(r"\x1b\[(31|0)m", "", written.out.replace("\x1b[31ma", "a", 1))
    assert sanitize(shown) == shown
    assert shown.count("a\ufffd]52") == 5


@pytest.mark.parametrize("name", ["", "data", "data gsm8k", "data guess_number", *COMMANDS])
def test_no_usage_error_steers_the_terminal(name, capsys, monkeypatch, tmp_path):
    """This includes errors of the command's own module, which the common program does not run then."""
    monkeypatch.chdir(tmp_path)
    hostile = ["--\x1b]0;x\x07", "\x9b2J", "\u202e=\r"]
    with contextlib.suppress(SystemExit):
        program_of_all.main([*name.split(), *hostile])
    if name in COMMANDS:
        raw = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        with contextlib.redirect_stderr(raw), contextlib.suppress(SystemExit):
            importlib.import_module(COMMANDS[name][0]).main(hostile)
        written = raw.buffer.getvalue().decode()
        assert sanitize(written) == written
    shown = "".join(capsys.readouterr())
    assert sanitize(shown) == shown


def test_a_progress_bar_of_a_library_begins_its_line_again():
    inside = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with contextlib.redirect_stderr(inside):
        lenient_output()
        sys.stderr.write("\r 50%\r\x1b[A")
    assert inside.buffer.getvalue().decode() == "\r 50%\ufffd\ufffd[A"


def test_text_without_a_secret_stays_as_it_is():
    for text in (
        "--set x: not of the form KEY=VALUE.",
        "actor_rollout_ref.rollout.max_num_batched_tokens=abc is not a number",
        "    tokens = torch.cat([sample['prompt'], end])",
    ):
        assert masked_text(text) == text


def test_no_error_or_log_line_holds_a_password(tmp_path, capsys):
    """Any key with an address is masked, also without a scheme."""
    texts = ["reward.url='http://me:hunter2@h/x' is", "x.url=me:hunter2@h:80/x", "https://h/?a=1&sig=hunter2"]
    texts += [
        "H: X-Api-Key: hunter2",
        "authorization: Token hunter2",
        "Authorization: SSWS hunter2",
        "Set-Cookie: a=b; session=hunter2",
        json.dumps({"password": '1"hunter2'}),
        '{"password": "hunter2 hunter2"}',
        "key='hunter2'",
    ]

    @command
    def program(argv):
        with logs.session():
            logs.open_train_log(tmp_path)
            log.warning("%s", "\n".join(texts))
            raise DataError("\n".join(texts))

    assert program([]) == 2
    with pytest.raises(SystemExit):
        program_of_all.main(["view", "run", "--api-key=hunter2", "--hub_token", "hunter2"])
    assert "hunter2" not in "".join(capsys.readouterr()) + (tmp_path / "train.log").read_text()
