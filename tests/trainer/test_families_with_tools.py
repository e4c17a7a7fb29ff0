"""Several turns with tools in each family: the recorded rollout equals plain transformers."""

import pytest

from tests.tiny_families import CALLING, ROOM, measured, save_calling_family
from tests.tiny_tools import tool_run

FAMILIES = [pytest.param(name, marks=[] if of.is_fast else pytest.mark.long) for name, of in CALLING.items()]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_masks_and_contexts_of_several_turns(process_group, tiny_trainer, tmp_path, name):
    calling = CALLING[name]
    model = save_calling_family(tmp_path / "model", calling)
    of = measured(tiny_trainer(**tool_run(model, tmp_path) | ROOM), model)
    assert of.most_turns > 2
    assert of.num_contexts > 20
    assert of.gap < calling.most
