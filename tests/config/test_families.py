"""The table of families, compared with transformers' classes."""

import importlib

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from rltrain.config.schema.families import FAMILIES


def config_of(name):
    if name not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    return AutoConfig.for_model(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_of_a_family_of_transformers_and_says_what_is_there(name):
    family, config = FAMILIES[name], config_of(name)
    assert (family.images or family.why_no_images != type(family)().why_no_images) <= hasattr(config, "vision_config")
    if family.gated_delta_nets:
        assert "linear_attention" in config.layer_types
    if family.closed_layers:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
        assert hasattr(module, family.closed_layers)


def test_positions_have_three_rows_where_transformers_computes_such():
    for name, family in FAMILIES.items():
        if family.images:
            assert family.mrope == hasattr(model_class(name), "get_rope_index"), name


def model_class(name):
    config = config_of(name)
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    models = [value for key, value in vars(module).items() if key.endswith("Model") and hasattr(value, "forward")]
    return next((model for model in models if hasattr(model, "get_rope_index")), models[0])
