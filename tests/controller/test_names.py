"""A process may have a name that is no text; whoever looks at all processes of a node reads it all the same."""

import os
import signal
from pathlib import Path

import pytest

from rltrain.base import stacks
from rltrain.controller.launch.board import program_of


@pytest.fixture
def nameless():
    """A process with bytes for a name that are not UTF-8."""
    child = os.fork()
    if not child:
        Path("/proc/self/comm").write_bytes(b"caf\xe9")
        signal.pause()
    while Path(f"/proc/{child}/comm").read_bytes() != b"caf\xe9\n":
        pass
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_name_that_is_no_text_is_read(nameless):
    assert program_of(nameless) == "caf�"
    assert stacks._stat(nameless)[1] == str(os.getpid())
