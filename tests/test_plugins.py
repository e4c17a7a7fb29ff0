"""The files in docs/plugins.md, and callbacks."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rltrain.common.errors import ConfigError
from rltrain.common.stop import Stop
from rltrain.config.check import missing_files
from rltrain.run.callbacks.callback import CallbackList
from rltrain.run.callbacks.user import UserCallbacks
from rltrain.run.preflight.settings import check_plugins
from rltrain.trainer.metrics.step import Answered
from tests.config.commands import load, problems
from tests.local import local_trainer
from tests.tiny import small_run

pytestmark = pytest.mark.usefixtures("process_group")

PAGE = (Path(__file__).parent.parent / "docs" / "plugins.md").read_text()
SAMPLES = SimpleNamespace(numbers={"reward": np.array([0.0, 1.0])})


@pytest.fixture
def page(tmp_path) -> Path:
    """A folder with the files of the page."""
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return tmp_path


def plugin(folder: Path, text: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


def callbacks(folder: Path, text: str, name: str = "Mine") -> UserCallbacks:
    return UserCallbacks([f"{plugin(folder, text)}:{name}"])


def test_the_files_of_the_page_train_together(page, tiny_model, arithmetic_files, tmp_path, capsys):
    keys = dict(re.findall(r"`(\S+?)=(\w+\.py:\w+)`", PAGE)) | {"trainer.callbacks": "callback.py:Watch"}
    assert len(keys) == 5
    changes = {key.replace(".", "__"): f"{page}/{name}" for key, name in keys.items()}
    run = small_run(tiny_model, arithmetic_files, tmp_path / "run", **changes)
    trainer = local_trainer(run)
    assert list(check_plugins(trainer.cfg)) == []
    callbacks = CallbackList(watch := UserCallbacks(trainer.cfg.trainer.callbacks))
    rows = trainer.experience.sampler.rows(0)
    assert len(set(rows)) == 4
    metrics = callbacks.on_step(trainer.step(1))
    assert metrics["actor/outside"] >= 0
    assert metrics["critic/advantages/min"] <= 0 <= metrics["critic/advantages/max"]
    assert metrics["watch/best_reward"] == metrics["critic/rewards/max"]
    assert metrics["callbacks/errors"] == 0
    assert "watch/hours" in metrics
    callbacks.on_validation(trainer.validation.run(1, Stop()))
    assert "val-core/" in capsys.readouterr().out
    watch.on_save(1, tmp_path / "global_step_1", 0.0)
    assert json.loads((tmp_path / "saved.jsonl").read_text())["step"] == 1


def test_a_callback_that_raises_is_told_once_and_the_run_goes_on(tmp_path, caplog):
    text = (
        "class Mine:\n    def on_step(self, step, metrics):\n"
        "        metrics.clear()\n        raise ValueError(f'at {step}')\n"
    )
    found = callbacks(tmp_path, text)
    metrics = {"a": 1.0}
    with caplog.at_level(logging.WARNING):
        assert found.on_step(Answered(1, metrics, SAMPLES, 1)) == {"callbacks/errors": 1.0}
        assert found.on_step(Answered(2, metrics, SAMPLES, 1)) == {"callbacks/errors": 2.0}
    assert metrics == {"a": 1.0}, "callbacks get copies"
    assert len(caplog.records) == 1
    assert "ValueError: at 1" in caplog.text
    assert "mine.py:Mine" in caplog.text


@pytest.mark.parametrize(("returned", "said"), [("3", "not 3"), ("{'a': 2}", "a is already a metric")])
def test_what_is_no_metric_is_not_logged(tmp_path, caplog, returned, said):
    found = callbacks(tmp_path, f"def Mine(step, metrics): return {returned}")
    assert found.on_step(Answered(1, {"a": 1.0}, SAMPLES, 1)) == {"callbacks/errors": 1.0}
    assert said in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Mine: pass", "it has none of the methods on_step, on_validation, on_save"),
        ("class Mine:\n    def on_steps(self, step, metrics): pass", "Did you mean on_step?"),
        (
            "class Mine:\n    def on_step(self, step): pass",
            "on_step must take (step, metrics, samples); it takes (self, step)",
        ),
        (
            "class Mine:\n    def __init__(self, x): pass\n    def on_save(self, step, folder): pass",
            "created without arguments, but it takes (x)",
        ),
        ("class Mine:\n    def __init__(self): 1 / 0\n    def on_save(self, step, folder): pass", "ZeroDivisionError"),
    ],
)
def test_a_callback_that_does_not_fit_is_refused_at_the_start(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        callbacks(tmp_path, text)
    assert said in str(caught.value)
    assert str(caught.value).startswith("trainer.callbacks=")


def test_the_key_of_callbacks_names_files():
    assert "trainer.callbacks=['wandb']: 'wandb' is not the name of a class" in problems("trainer.callbacks=wandb")[0]
    assert "trainer.callbacks: no/file.py does not exist." in missing_files(
        load("trainer.callbacks=[no/file.py:Mine]").config
    )
