import pytest

from rltrain.data import chat
from rltrain.run import dry_run
from rltrain.run.preflight import settings as preflight


@pytest.fixture
def of_another_machine(monkeypatch):
    """A dry run on the machine that a script is for: its devices, packages and Ray are there. Few rows are read, and
    chat templates, which are ours, end: a fork that tries them is a third of the time."""
    for name in ("check_devices", "check_packages", "ray_problems"):
        monkeypatch.setattr(preflight, name, lambda *_: [])
    monkeypatch.setattr(dry_run, "MOST_ROWS", 8)
    monkeypatch.setattr(chat, "problem_in_fork", lambda *_: "")
