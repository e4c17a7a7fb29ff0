"""Run folders that cannot be written, on separate small file systems."""

import subprocess
import sys

import pytest

from tests.hosts.hosts import forbidden
from tests.tiny import small_run

# In a mount namespace, which takes all mounts with it when it ends.
SCRIPT = """
import subprocess, sys
from pathlib import Path
from rltrain.main_ppo import main
from rltrain.run.checkpoints.folder import RunFolder

place, *words = sys.argv[1:]

def mount(name, *flags):
    folder = Path(place, name)
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", *flags, "tmpfs", str(folder)], check=True)
    return folder

def run(folder):
    print("code", main([*words, f"trainer.default_local_dir={folder}"]), file=sys.stderr)

run(mount("read_only", "-o", "ro"))
full = mount("full", "-o", "size=64k")
with open(full / "other", "wb", buffering=0) as file:
    try:
        while file.write(bytes(1024)):
            pass
    except OSError:
        pass
run(full)
taken = Path(place, "taken")
(taken / "run.lock").mkdir(parents=True)
run(taken)
busy = mount("left/.tmp_global_step_2_9/busy").parent.parent
RunFolder(str(busy)).release()
print("it starts", file=sys.stderr)
"""


@pytest.mark.long
@pytest.mark.fault("A run folder that is read-only or full ends the start with one sentence and exit 74")
def test_a_folder_that_cannot_be_written_is_told(tiny_model, arithmetic_files, tmp_path):
    if reason := forbidden():
        pytest.skip(reason)
    words = small_run(tiny_model, arithmetic_files, tmp_path)[:-1]
    command = ["unshare", "--mount", sys.executable, "-c", SCRIPT, str(tmp_path), *words]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = process.stderr
    assert process.returncode == 0, said
    assert said.count("code 74") == 3, said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    for words in (
        f"nothing can be written into the run folder {tmp_path}/read_only: [Errno 30] Read-only file system",
        f"nothing can be written into the run folder {tmp_path}/full: [Errno 28] No space left on device",
        f"nothing can be written into the run folder {tmp_path}/taken: [Errno 21] Is a directory",
        "choose another trainer.default_local_dir",
        ".tmp_global_step_2_9 cannot be removed: [Errno 16] Device or resource busy",
        "it starts",
    ):
        assert words in said
