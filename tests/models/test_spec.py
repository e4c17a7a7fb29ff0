"""What a role's sections of the config become."""

import pytest

from rltrain.config.load import load_config
from rltrain.device import get_device
from rltrain.models.spec import actor_spec, critic_spec
from tests.tiny import save_tiny_model


@pytest.mark.parametrize(("spec", "section"), [(actor_spec, "actor_rollout_ref.model"), (critic_spec, "critic.model")])
def test_attention_cannot_be_overridden_and_other_fields_can(spec, section, tmp_path):
    fields = "{attn_implementation:flash_attention_2,max_position_embeddings:256}"
    model = save_tiny_model(tmp_path / "model")
    config = load_config([f"{section}.path={model}", f"{section}.override_config={fields}"]).config
    made = spec(config, get_device("cpu"))
    made.load_config()
    assert made.override == {"max_position_embeddings": 256}
