"""Calls are checked by mypy, and every role and method that the driver names is there."""

from inspect import isfunction
from pathlib import Path

import pytest
from mypy import api

from rltrain.controller.calls import bind
from rltrain.workers import roles

ROOT = Path(__file__).parent.parent.parent
GOOD = """
from typing import Any

from typing_extensions import assert_type
from rltrain.controller.calls import bind
from rltrain.controller.group import WorkerGroup
from rltrain.controller.samples import Request
from rltrain.workers.results import GenerationNumbers, PassNumbers
from rltrain.workers.roles import Actor, Rollout
from rltrain.workers.tasks import GenerateTask, UpdateTask


def good(group: WorkerGroup, request: Request, task: UpdateTask, prompts: GenerateTask) -> None:
    assert_type(group.call(Actor.load, "folder", True), list[list[str]])
    log_probs = bind(Actor.log_probs, request.as_batch, [1, 2])
    assert_type(group.submit([log_probs]).collect(), list[tuple[Any, PassNumbers]])
    assert_type(group.submit([bind(Rollout.generate, prompts)]).collect(), list[tuple[Any, Any, GenerationNumbers]])
    bind(Actor.update, request.as_batch, task)
"""
WRONG = {
    'group.call(Actor.saev, "folder")': 'has no attribute "saev"',
    "group.call(Actor.load, 3, True)": "expected",
    "group.call(Actor.load)": 'Missing positional arguments "folder", "weights_only"',
    "bind(Actor.update, request, task)": 'has incompatible type "Request"',
    "bind(Actor.update, request.as_batch, prompts)": 'has incompatible type "GenerateTask"',
    'names: list[str] = group.call(Actor.load, "folder", True)': "incompatible type",
}
UNFINISHED = """

class Forgetful(Actor):
    def load(self, folder: int, weights_only: bool) -> list[str]:
        return []


Forgetful()
"""

# Of other packages' types nothing is asked here, and mypy takes most of its time to read those of PyTorch; errors in
# our own files are for `make check` to tell.
SETTINGS = """
[mypy]
python_version = 3.10
ignore_missing_imports = true
check_untyped_defs = true
no_implicit_optional = true

[mypy-rltrain.*]
follow_imports = silent

[mypy-torch.*,numpy.*,transformers.*,ray.*]
follow_imports = skip
follow_imports_for_stubs = true
"""


# That our own calls are right `make check` says; this, that it would say if they were not.
@pytest.mark.long
def test_mypy_finds_wrong_calls_and_unfinished_roles(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    wrong = "\n\ndef wrong(group: WorkerGroup, request: Request, task: UpdateTask, prompts: GenerateTask) -> None:\n"
    file, first = tmp_path / "calls.py", GOOD.count("\n") + 3
    file.write_text(GOOD + wrong + "".join(f"    {line}\n" for line in WRONG) + UNFINISHED)
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    # A folder of its own, as other settings make nothing of what `make check` has kept.
    cache = ROOT / ".mypy_cache" / "calls"
    found, errors, _ = api.run([f"--config-file={settings}", f"--cache-dir={cache}", str(file)])
    assert not errors
    lines = [line for line in found.splitlines() if ": error: " in line and "calls.py" in line]
    for number, (code, message) in enumerate(WRONG.items(), first + 1):
        assert any(f":{number}: " in line and message in line for line in lines), (code, found)
    assert any("is incompatible with supertype" in line for line in lines), found
    assert any("Cannot instantiate abstract class" in line for line in lines), found
    assert len(lines) == len(WRONG) + 2, found


def test_what_stays_in_the_store_follows_from_the_signature():
    methods = {
        f"{role}.{name}": bind(method).num_objects
        for role, protocol in vars(roles).items()
        if isinstance(protocol, type) and protocol.__module__ == roles.__name__
        for name, method in vars(protocol).items()
        if isfunction(method) and not name.startswith("_")
    }
    two = {"Rollout.generate", "Rollout.load_answers"}
    one = {
        "Actor.log_probs",
        "Actor.ref_log_probs",
        "Critic.values",
        "Frozen.log_probs",
        "Judge.replies",
        "Advantages.advantages",
        "Advantages.spread_over_turns",
        "Rollout.take_finished",
        "Actor.write",
        "Critic.write",
        "Reference.write",
    }
    assert {name for name, number in methods.items() if number == 2} == two
    assert {name for name, number in methods.items() if number == 1} == one
