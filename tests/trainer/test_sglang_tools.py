"""Tools on SGLang, by the double of its package: turns and contexts are what they are on the other engines."""

import sys

import numpy as np
import pytest

from rltrain.base.columns import names as c
from tests.tiny_tools import CALL_ID, END_ID, save_calling_model, tool_run
from tests.workers import sglang_double

R = "actor_rollout_ref__rollout__"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    for name, module in sglang_double.MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    return tool_run(save_calling_model(tmp_path / "calling"), tmp_path) | {R + "name": "sglang"}


def test_an_answer_goes_on_behind_the_tools(process_group, tiny_trainer, tools):
    trainer = tiny_trainer(**tools)
    batch, texts, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    turns = numbers.per_sample[c.NUM_TURNS]
    assert turns.max() > 2
    rows = (batch.ragged(name).rows() for name in (c.RESPONSE, c.RESPONSE_MASK))
    for answer, mask, text, count in zip(*rows, texts, turns.tolist(), strict=True):
        borders = np.flatnonzero(np.diff(mask.numpy().astype(int)))
        assert mask[0], mask[-1]
        assert len(borders) == 2 * (count - 1)
        assert all(answer[border] == CALL_ID for border in borders[::2].tolist())
        assert all(answer[border + 1] == END_ID for border in borders[::2].tolist())
        assert text.count("<tool_response>\n5\n</tool_response>") == count - 1
    assert trainer.step(1).metrics["training/rollout_probs_diff_mean"] < 1e-4
    trainer.worker.rollout.engine.close()
