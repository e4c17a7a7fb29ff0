"""Shared fixtures: a tiny model with its own tokenizer, created on demand, and two-process runs without Ray."""

import contextlib
import functools
import gc
import itertools
import os
import subprocess
from collections import Counter, defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests must not use a token in the user's home. Tests of tokens have separate homes.
os.environ["RAY_AUTH_MODE"] = "disabled"

from pathlib import Path

import omegaconf.base
import pytest
import torch
import torch.distributed as dist

from tests.cost import MARKERS, STARTED, costs
from tests.hosts.hosts import Network, forbidden
from tests.tables import Tables
from tests.tiny import save_tiny_model, small_config, small_run, write_arithmetic

# Resolving references took a third of the time of reading a configuration, which tests do thousands of times.
omegaconf.base.parse = functools.cache(omegaconf.base.parse)


def pytest_addoption(parser):
    parser.addoption("--table", choices=["faults", "long"], help="write this table of tests/README.md")


def pytest_configure(config):
    config.pluginmanager.register(Tables())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Set the markers of cost, mark the cases that ``few(n)`` omits as long, and put expensive files first."""
    tests, smoke = defaultdict(list), Counter()
    for item in items:
        if marker := item.get_closest_marker("smoke"):
            test = item.nodeid.partition("[")[0]
            smoke[test] += 1
            if smoke[test] > marker.kwargs.get("cases", 1):
                item.own_markers = [each for each in item.own_markers if each.name != "smoke"]
        for marker in costs(item):
            item.add_marker(marker)
        if item.get_closest_marker("few") and not item.get_closest_marker("long"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        (number,) = cases[0].get_closest_marker("few").args
        made = {len(cases) * place // number for place in range(number)}
        for place, item in enumerate(cases):
            if place not in made:
                item.add_marker(pytest.mark.long)
    # Files that wait for processes start first, followed by the longest of the others, so that no core is idle at the
    # end.
    expensive = {item.path for item in items if MARKERS.intersection(mark.name for mark in item.iter_markers())}
    items.sort(key=lambda item: item.path not in expensive and item.path.name != "test_model_check.py")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    STARTED.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    # pytest-xdist cannot send half of a surrogate pair.
    report.sections = [(title, text.encode("utf-8", "replace").decode()) for title, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def announced_costs(request):
    """Fail a test that starts another Python without a marker. Otherwise the README's test command would slow down
    unnoticed."""
    yield
    if not MARKERS.intersection(mark.name for mark in request.node.iter_markers()):
        assert not STARTED, f"{STARTED[0]} was started: tests/cost.py needs a name of this test's code that tells so"


def pytest_unconfigure():
    gc.unfreeze()  # packages report objects left at the end of Python


@pytest.fixture(scope="session", autouse=True)
def threads():
    """One thread, unless OMP_NUM_THREADS sets more."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Freeze imports and other objects that modules create, because searching them repeatedly took a third of
    the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A two-layer Qwen3 with tied embeddings and a character tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def arithmetic_files(tmp_path_factory) -> tuple[Path, Path]:
    """train.parquet (24 rows) and test.parquet (6 rows) in verl's schema."""
    folder = tmp_path_factory.mktemp("arithmetic")
    return write_arithmetic(folder / "train.parquet", range(24)), write_arithmetic(
        folder / "test.parquet", range(24, 30)
    )


@pytest.fixture(scope="module")
def process_group():
    """A process group of this process only, which trainers and models without Ray need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def tiny_trainer(tiny_model, arithmetic_files, tmp_path):
    """tiny_trainer(twist=None, **changes): `local_trainer` of a small run; ``twist(row, score)`` changes scores."""
    from tests.local import local_trainer

    made = []

    def make(twist=None, **changes):
        # Recomputing layers takes longer and changes nothing: tests/trainer/test_lora_step.py and runs with Ray test
        # it.
        keys = {"actor_rollout_ref__model__enable_gradient_checkpointing": False} | changes
        made.append(local_trainer(small_run(tiny_model, arithmetic_files, tmp_path, **keys), twist))
        return made[-1]

    yield make
    for trainer in made:
        if answering := trainer.worker.rollout._answering:
            answering._executors.shutdown()


@pytest.fixture
def twisted_trainer(tiny_trainer):
    """The same, with different scores for different responses."""

    def make(twist=lambda row, score: score, **changes):
        count = itertools.count()
        return tiny_trainer(lambda row, score: twist(row, score + (next(count) * 7 % 5) / 5), **changes)

    return make


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """network(number, delay_ms=0, loss=0): create that many `Host`s, which end with the module's tests."""
    if reason := forbidden():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:

        def make(number: int, **wire: float):
            found = Network(tmp_path_factory.mktemp("network"), number, **wire)
            stack.callback(found.end)
            return found.hosts

        yield make


@pytest.fixture(scope="module")
def local_ray():
    """A local Ray of this process, with four CPUs and forked workers (`tests.faults.nursery`)."""
    import ray

    from rltrain.runtime.cluster import start_ray
    from tests.faults import nursery

    before = dict(os.environ)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(nursery.variables())
    config = small_config()
    config.ray_kwargs.ray_init["num_cpus"] = 4
    start_ray(config.cluster)
    yield ray
    ray.shutdown()
    os.environ.clear()  # Ray and its start leave variables behind
    os.environ.update(before)
