"""The conditions under which an engine captures graphs."""

import pytest

from tests.workers.engines import rollout_of, settings_of


@pytest.mark.parametrize(
    ("device", "written", "eager"),
    [("cpu", None, True), ("npu", None, False), ("cuda", True, True), ("cpu", False, False)],
)
def test_graphs_are_for_accelerators(device, written, eager):
    assert settings_of("model", rollout_of(enforce_eager=written), device=device).eager is eager
