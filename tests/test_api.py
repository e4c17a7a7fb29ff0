"""The public names of `import rltrain`."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import rltrain
from rltrain import api
from rltrain.common.errors import ConfigError, DataError
from rltrain.run.callbacks.user import UserCallbacks
from rltrain.trainer.metrics.step import Answered
from tests.config.commands import BASE


def test_the_package_shows_its_entry_and_imports_nothing_heavy():
    code = (
        "import sys, rltrain; names = set(rltrain.__all__); "
        "assert names == set(dir(rltrain)) and len(names) > 8; "
        "assert not {'torch', 'ray', 'omegaconf'} & set(sys.modules); "
        "[getattr(rltrain, name) for name in names - {'Trainer', 'read_metrics'}]; "
        "assert not {'torch', 'ray', 'pandas'} & set(sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = rltrain.trian


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_run_from_python_that_a_signal_stops_says_so(monkeypatch, tmp_path, number, exit_code):
    def run(loaded, notes, stop, callbacks):
        assert notes == ["data.val_max_samples: no effect: data.val_files is not set"]
        signal.raise_signal(number)

    monkeypatch.setattr(api, "run", run)
    before = signal.getsignal(number)
    settings = [*BASE, f"trainer.default_local_dir={tmp_path}", "data.val_max_samples=8"]
    assert rltrain.train(rltrain.load_config(settings)) == rltrain.RunResult(tmp_path, exit_code)
    assert signal.getsignal(number) == before


def test_the_end_of_a_run_shows_its_metrics(tmp_path):
    steps = [{"step": 1, "loss": 2.0}, {"step": 1, "val/x": 0.25}, {"step": 2, "loss": 1.0}]
    lines = [{"step": 0, "val/x": 0.5}, *steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = rltrain.RunResult(tmp_path, 0)
    assert list(result.table().index) == [0, 1, 2]
    assert result.newest() == {"loss": 1.0, "val/x": 0.25}
    assert result.best("val/x") == (0, 0.5)
    with pytest.raises(DataError, match=r"no step has the metric val/y\. Near: val/x"):
        result.best("val/y")
    with pytest.raises(DataError, match="does not exist"):
        rltrain.RunResult(tmp_path / "other", 0).newest()


def test_a_configuration_has_four_forms(tmp_path):
    (tmp_path / "run.yaml").write_text("data:\n  train_batch_size: 8\n")
    forms = [
        ["data.train_batch_size=8"],
        {"data.train_batch_size": 8},
        {"data": {"train_batch_size": 8}},
        str(tmp_path / "run.yaml"),
        tmp_path / "run.yaml",
        rltrain.load_config(["data.train_batch_size=8"]),
    ]
    configurations = [api.read(form) for form in forms]
    assert {loaded.config.data.train_batch_size for loaded in configurations} == {8}
    assert {loaded.explicit for loaded in configurations} == {frozenset({"data.train_batch_size"})}
    with pytest.raises(ConfigError, match=r"Did you mean data\.train_batch_size"):
        api.read({"data": {"train_batch_sice": 8}})


def test_an_object_is_loaded_by_another_process(tmp_path):
    scale = 3.0

    def score(data_source, solution_str, ground_truth, extra_info=None):
        return scale * len(solution_str)

    loaded = rltrain.load_config([*BASE, f"trainer.default_local_dir={tmp_path}"])
    custom = api.with_code(loaded, reward=score).config.custom_reward_function
    code = (
        "import sys; from rltrain.rewards.custom import CustomReward, RewardFunction; "
        f"assert RewardFunction(CustomReward({custom.path!r}, {custom.name!r}))('s', 'abcd', '1', {{}}) == 12.0; "
        "assert not {'ray', 'torch', 'tests', 'tests.test_api'} & set(sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_declarations_travel_with_an_estimator(tmp_path):
    from rltrain.algorithms.advantages import TokenAdvantages, token_estimator

    @token_estimator(values=True)
    def mine(inputs, cfg):
        return TokenAdvantages(inputs.rewards, inputs.rewards)

    loaded = rltrain.load_config([*BASE, f"trainer.default_local_dir={tmp_path}"])
    algorithm = api.with_code(loaded, advantage=mine).config.algorithm
    assert algorithm.estimator.values
    assert algorithm.estimator.per_token


def test_an_object_that_cannot_travel_is_refused_with_advice(tmp_path):
    lock = threading.Lock()
    loaded = rltrain.load_config([*BASE, f"trainer.default_local_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"reward: <lambda> cannot be sent to other processes: .*lock.*FILE\.py:NAME"):
        api.with_code(loaded, reward=lambda **_: lock)


def test_callbacks_stay_the_callers_own_objects():
    class Mine:
        def __init__(self):
            self.steps = []

        def on_step(self, step, metrics):
            self.steps.append(step)

    mine, steps = Mine(), []
    callbacks = UserCallbacks([], [mine, lambda step, metrics: steps.append(step)])
    callbacks.on_step(Answered(3, {}, SimpleNamespace(numbers={}), 1))
    assert (mine.steps, steps) == ([3], [3])
    with pytest.raises(ConfigError, match="it has none of the methods on_step"):
        UserCallbacks([], [object()])


def test_the_page_lists_the_whole_public_surface():
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    for name in set(rltrain.__all__) - {"__version__"}:
        assert f"`{name}" in page, name
