"""Access to a run: the addresses that its processes listen on, and Ray's reply to clients without its token."""

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.plug import over, processes_of, wait_for_step
from tests.tiny import small_run

LISTENS = "0A"  # Linux's number of the state
INTRUDER = """
import sys
from ray._raylet import GcsClient
try:
    print("came in", GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=20))
except Exception as error:
    print(error)
"""


def listening(pids: list[int]) -> Iterator[tuple[str, int, str]]:
    """Return address, port and process of every TCP socket that these processes listen on."""
    owners = {}
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                owners[os.readlink(file)] = (Path(f"/proc/{pid}/cmdline").read_text() + " ").split("\0")[0]
            except OSError:  # it was closed meanwhile
                continue
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and (owner := owners.get(f"socket:[{words[9]}]")):
                address, port = words[1].split(":")
                numbers = [int(address[first : first + 8], 16) for first in range(0, len(address), 8)]
                yield socket.inet_ntop(family, struct.pack(f"={len(numbers)}I", *numbers)), int(port, 16), owner


@pytest.mark.fault("Nothing of a run on one machine listens beyond it, and its Ray refuses whoever has no token")
@pytest.mark.long
@pytest.mark.usefixtures("own_ray")
def test_nothing_of_a_run_on_one_machine_listens_beyond_it(start, tiny_model, arithmetic_files, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE")
    home = tmp_path / "home"
    home.mkdir()
    run = tmp_path / "run"
    args = small_run(
        tiny_model, arithmetic_files, run, trainer__total_training_steps=100000, trainer__n_gpus_per_node=2
    )
    process = start(args, whole=True, HOME=str(home))
    wait_for_step(run, 1, process)
    pids = [int(line.split()[0]) for line in processes_of(tmp_path)]
    found = list(listening(pids))
    assert {owner for _, _, owner in found if "_Host" in owner or "gcs_server" in owner or "raylet" in owner}
    beyond = [each for each in found if each[0].removeprefix("::ffff:") not in ("127.0.0.1", "::1")]
    assert beyond == []
    assert (home / ".ray/auth_token").stat().st_mode & 0o077 == 0
    (gcs,) = [port for _, port, owner in found if owner.endswith("gcs_server")]
    tokens = {"came in": (home / ".ray/auth_token").read_text().strip(), "InvalidAuthToken": "0" * 64}
    for words, token in tokens.items():
        intruder = [sys.executable, "-c", INTRUDER, f"127.0.0.1:{gcs}"]
        told = subprocess.run(
            intruder, env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert words in told.stdout, told
    process.terminate()
    over(process, 75)
