"""What `import rltrain` gives."""

import signal
import subprocess
import sys

import pytest

import rltrain
from rltrain import api
from rltrain.errors import ConfigError

GOOD = [
    "actor_rollout_ref.model.path=m",
    "data.train_files=t.parquet",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
]


def test_the_package_shows_its_entry_and_imports_nothing_heavy():
    code = (
        "import sys, rltrain; names = {'load_config', 'train', 'build', 'RunResult', '__version__'}; "
        "assert names == set(dir(rltrain)) == set(rltrain.__all__); assert not {'torch', 'ray', 'omegaconf'} & set(sys.modules); "
        "from rltrain import *; train, build, load_config, RunResult; assert not {'torch', 'ray'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = rltrain.trian


def test_training_from_python_checks_as_the_command_does():
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.n must be >= 2"):
        rltrain.train(rltrain.load_config([*GOOD, "actor_rollout_ref.rollout.n=1"]))


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_run_from_python_that_a_signal_stops_says_so(monkeypatch, tmp_path, number, exit_code):
    def run(loaded, notes, stop):
        assert notes == ["data.gen_batch_size: no effect: filter_groups.enable=False"]
        signal.raise_signal(number)

    monkeypatch.setattr(api, "run", run)
    before = signal.getsignal(number)
    settings = [*GOOD, f"trainer.default_local_dir={tmp_path}", "data.gen_batch_size=8"]
    assert rltrain.train(rltrain.load_config(settings)) == rltrain.RunResult(tmp_path, exit_code)
    assert signal.getsignal(number) == before


def test_errors_of_a_run_from_python_arrive_as_they_are(monkeypatch):
    def run(loaded, notes, stop):
        raise ValueError("mine")

    monkeypatch.setattr(api, "run", run)
    with pytest.raises(ValueError, match="mine"):
        rltrain.train(GOOD)
