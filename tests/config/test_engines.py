"""The table of rollout engines says what is true of each."""

import ast
import dataclasses
from pathlib import Path

import pytest

import rltrain
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.rollout import RolloutConfig
from tests.workers.engines import rollout_of, settings_of

PACKAGE = Path(rltrain.__file__).parent


@pytest.mark.parametrize("name", ENGINES)
def test_an_engines_factory_is_a_class_that_exists(name):
    module, _, cls = ENGINES[name].factory.partition(":")
    file = PACKAGE.parent / (module.replace(".", "/") + ".py")
    classes = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    assert cls in classes


@pytest.mark.parametrize(
    ("device", "written", "eager"),
    [("cpu", None, True), ("npu", None, False), ("cuda", True, True), ("cpu", False, False)],
)
def test_graphs_are_for_accelerators(device, written, eager):
    assert settings_of("model", rollout_of(enforce_eager=written), device=device).eager is eager


@pytest.mark.parametrize("name", ENGINES)
def test_an_engines_unused_keys_are_rollout_keys(name):
    fields = {field.name for field in dataclasses.fields(RolloutConfig)}
    assert set(ENGINES[name].unused_keys) <= fields
