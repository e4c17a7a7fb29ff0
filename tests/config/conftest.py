import pytest

from rltrain.data import chat
from rltrain.run import dry_run
from rltrain.run.preflight import settings as preflight


@pytest.fixture
def of_another_machine(monkeypatch):
    """A dry run on the machine for which a script was written, with its devices, packages and Ray. Few rows are read,
    and our chat templates are not tried in a fork, which would take a third of the time because they always end."""
    for name in ("check_devices", "check_packages", "ray_problems"):
        monkeypatch.setattr(preflight, name, lambda *_: [])
    monkeypatch.setattr(dry_run, "MOST_ROWS", 8)
    monkeypatch.setattr(chat, "problem_in_fork", lambda *_: "")
