import fcntl
import sys
import types

import pytest

from rltrain.tools import sync


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with two offline folders, one of them sent; the other is sent when `sent` says so."""
    for name, marks in (("20260101_000000", (".wandb", ".wandb.synced")), ("20260101_010000", (".wandb",))):
        folder = tmp_path / "wandb" / f"offline-run-{name}-abc"
        folder.mkdir(parents=True)
        for mark in marks:
            (folder / f"run-abc{mark}").touch()
    (tmp_path / "tracking.json").write_text('{"wandb": "abc", "swanlab": "s", "mlflow": "m"}')
    monkeypatch.setattr(sync, "installed", lambda package: True)
    monkeypatch.setattr(sync, "refusal", lambda: "")
    return tmp_path


@pytest.fixture
def sent(monkeypatch):
    """What was given to wandb's command, which succeeds for the first so many folders."""
    calls = types.SimpleNamespace(folders=[], num_arriving=9)

    def call(words, **_):
        given = words[words.index("sync") + 1 :]
        calls.folders.append([each.rpartition("/")[2] for each in given])
        for each in given[: calls.num_arriving]:
            (sync.Path(each) / "run-abc.wandb.synced").touch()

    monkeypatch.setattr(sync.subprocess, "run", call)
    return calls


def test_only_what_has_not_arrived_is_sent_and_once(run, sent, capsys):
    assert sync.main([str(run)]) == 0
    assert sync.main([str(run)]) == 0
    assert sent.folders == [["offline-run-20260101_010000-abc"]]
    said = capsys.readouterr().out
    assert "1 of 1 offline folders" in said
    assert "all is sent" in said
    assert f"swanlab sync {run}/swanlog/run-*" in said
    assert "mlflow: run m is" in said


def test_what_does_not_arrive_is_told_and_goes_with_the_next_call(run, sent, capsys):
    sent.num_arriving = 0
    assert sync.main([str(run)]) == 75
    assert "1 did not arrive, see above. The same command goes on" in capsys.readouterr().err
    sent.num_arriving = 1
    assert sync.main([str(run)]) == 0


def test_ctrl_c_ends_in_a_sentence(run, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sync.subprocess, "run", interrupted)
    assert sync.main([str(run)]) == 75
    assert "0 of 1 offline folders" in capsys.readouterr().out


def test_a_run_that_is_not_over_is_not_sent(run, sent, capsys):
    with open(run / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sync.main([str(run)]) == 2
    assert "is in use by" in capsys.readouterr().err
    assert not sent.folders


def test_two_senders_do_not_send_twice(run, sent, capsys):
    with open(run / "wandb" / "sync.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sync.main([str(run)]) == 2
    assert "is being sent by another process" in capsys.readouterr().err
    assert not sent.folders


@pytest.mark.parametrize("words", [[], ["-h"], ["a", "b"]])
def test_usage(words, capsys):
    assert sync.main(words) == (0 if words == ["-h"] else 2)
    assert "usage: python -m rltrain.sync RUN_FOLDER" in capsys.readouterr().err


def test_what_stands_in_the_way_is_a_sentence(run, sent, monkeypatch, capsys):
    assert sync.main([str(run / "no")]) == 2
    monkeypatch.setattr(sync, "refusal", lambda: "not logged in")
    assert sync.main([str(run)]) == 2
    monkeypatch.setattr(sync, "installed", lambda package: False)
    assert sync.main([str(run)]) == 2
    said = capsys.readouterr().err
    for words in ("no is no folder", "W&B takes nothing now: not logged in. Mend", "pip install wandb"):
        assert words in said
    assert not sent.folders


def test_a_dead_server_is_told_before_anything_is_sent(run, monkeypatch, capsys):
    """With the stand-in of a package whose login asks the server, as wandb's does."""
    monkeypatch.undo()
    wandb = types.ModuleType("wandb")
    wandb.errors = types.SimpleNamespace(Error=ValueError)
    wandb.Settings = lambda **given: types.SimpleNamespace(**given, api_key="key")
    chosen = []
    wandb.setup = lambda *given: chosen.extend(given) or types.SimpleNamespace(settings=chosen[-1])

    def login(prompt=True, verify=False):
        assert (prompt, verify) == (False, True)
        raise ValueError("Failed to authenticate.\nMore of it.")

    wandb.login = login
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(sync, "installed", lambda package: True)
    assert sync.main([str(run)]) == 2
    assert "W&B takes nothing now: Failed to authenticate. Mend" in capsys.readouterr().err
    assert chosen[0].mode == "online"  # whatever WANDB_MODE is
