"""Messages between ranks: only JSON, and objects with the signature of the run, are read."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import ray

from rltrain.runtime.cluster import closed_folder, start_ray
from tests.tiny import small_config

ROOT = Path(__file__).parents[2]
# Two ranks. The second one has another key (or none), and sends an object that runs code when it is read.
RANK = """
import os, sys, pickle
import torch.distributed as dist
from rltrain.runtime.exchange import gather_json, sign_objects
from rltrain.models.weights import finite
from tests.tiny import small_config
folder, rank, key = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
assert gather_json(["rank", rank, "x" * rank]) == [["rank", 0, ""], ["rank", 1, "x"]]

class Bomb:
    def __reduce__(self):
        return os.mkdir, (folder + "/ran",)

if key:
    sign_objects(key)
box = [None, None]
try:
    dist.all_gather_object(box, Bomb() if sys.argv[3] == "other" and rank else rank)
    print(box)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(("key", "said"), [("same", "[0, 1]"), ("other", "WorkerLost")])
def test_an_object_without_the_signature_of_the_run_is_not_read(tmp_path, key, said):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank), key if rank else "same"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in ranks]
    assert outputs[0].startswith(said)
    assert not (tmp_path / "ran").exists()


def test_rays_folder_is_closed_to_other_users(tmp_path):
    folder = Path(closed_folder(str(tmp_path)))
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert closed_folder(str(tmp_path)) == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    # Another user was first: a link, or a folder of another owner.
    folder.rmdir()
    folder.symlink_to(tmp_path)
    other = Path(closed_folder(str(tmp_path)))
    assert other != folder
    assert other.stat().st_mode & 0o777 == 0o700
    session = "session_2026-11-29_20-52-46_806189_4194304/sockets/plasma_store"
    assert len(f"{closed_folder('/tmp')}/ray/{session}") <= 107


def test_a_start_of_ray_that_is_too_slow_is_tried_again():
    if ray.is_initialized():
        ray.shutdown()  # the plain one of other modules
    errors = [Exception("The current node timed out during startup."), None]
    # start_ray reads the source of ray.init, which inspect finds by __wrapped__.
    with patch("ray.init", side_effect=errors, __wrapped__=ray.init) as init:
        assert start_ray(small_config().cluster)
    assert init.call_count == 2
