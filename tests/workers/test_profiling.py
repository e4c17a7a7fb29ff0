"""A profiled phase: its trace, its table, and its start and end."""

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from rltrain.common.device import get_device
from rltrain.config.check import broken_rules
from rltrain.config.load import load_config
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.run.callbacks.profile import Profile
from rltrain.trainer.metrics.step import Answered
from rltrain.workers.diagnostics.profiling import Profiler, table


def test_kernels_that_overlap_are_busy_once_and_gaps_are_named():
    kernels = pd.DataFrame({"name": [*"abac"], "begin": [0, 1e6, 3e6, 8e6], "end": [4e6, 2e6, 5e6, 10e6]})
    kernels["own"] = kernels["end"] - kernels["begin"]
    lines = table(kernels).splitlines()
    assert lines[0] == "10.0000 s from the first kernel to the last, of which 70.0% was busy; 4 kernels."
    assert lines[4] == "| a | 2 | 6.0000 | 60.0% |"
    assert lines[-1] == "| a | 3.0000 | c |"
    assert table(kernels[:0]) == "No kernel ran.\n"


def test_a_profile_is_a_trace_that_a_viewer_reads_and_a_table(tmp_path):
    profiler = Profiler(get_device("cpu"))
    assert profiler.end_profile() == []
    profiler.begin_profile(str(tmp_path / "step_000001" / "ref_rank_00000"))
    torch.randn(64, 64) @ torch.randn(64, 64)
    files = profiler.end_profile()
    trace = json.loads(gzip.decompress((tmp_path / "step_000001" / "ref_rank_00000.json.gz").read_bytes()))
    assert "aten::mm" in {event.get("name") for event in trace["traceEvents"]}
    assert "| aten::mm | 1 |" in (tmp_path / "step_000001" / "ref_rank_00000.md").read_text()
    assert [file.rpartition("/")[2] for file in files] == ["ref_rank_00000.json.gz", "ref_rank_00000.md"]


class Group:
    """Records the calls of workers."""

    def __init__(self):
        self.asked = []

    def submit(self, calls, ranks):
        name = calls[0].args[0].rpartition("/")[2] if calls[0].args else ""
        self.asked.append((calls[0].method.__name__.partition("_")[0], [*ranks], name))
        return self

    def collect(self):
        return [["file"]]


def steps(cfg, *, num_steps=2):
    group = Group()
    profile = Profile(cfg, Path("run"), group)
    for step in range(1, num_steps + 1):
        profile.before_step(step)
        for name in ("gen", "reward", "ref", "adv", "update_actor"):
            profile.on_phase(name)
        profile.on_step(Answered(step, {}, None, 1))
        profile.on_phase("testing")
    return group.asked


def test_chosen_phases_of_chosen_steps_are_profiled_on_chosen_ranks():
    assert steps(TrainerConfig()) == []
    assert steps(TrainerConfig(profile_steps=[2])) == [
        ("begin", [0], "ref_rank_00000"), ("end", [0], ""),
        ("begin", [0], "update_actor_rank_00000"), ("end", [0], ""),
    ]  # fmt: skip
    asked = steps(TrainerConfig(profile_steps=[1], profile_phases=["gen"], profile_ranks=[0, 3]))
    assert asked == [("begin", [0], "gen_rank_00000"), ("begin", [3], "gen_rank_00003"), ("end", [0], ""),
                     ("end", [3], "")]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer.profile_steps=[0]"], "step 0 does not exist. Steps are counted from 1"),
        (["trainer.profile_phases=[generate]"], "phase 'generate' does not exist. A step"),
        (["trainer.profile_ranks=[2]"], "rank 2 does not exist. With 2 devices"),
    ],
)
def test_what_a_run_does_not_have_is_named(words, said):
    loaded = load_config(["trainer.n_gpus_per_node=2", "trainer.device=cpu", "trainer.profile_steps=[1]", *words])
    assert [problem for problem in broken_rules(loaded) if said in problem]
