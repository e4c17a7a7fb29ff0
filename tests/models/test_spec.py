"""The model spec that follows from a role's sections of the config."""

import pytest

from rltrain.common.device import get_device
from rltrain.config.load import load_config
from rltrain.models.weights.spec import actor_spec, critic_spec, frozen_spec, reward_model_spec
from tests.tiny import save_tiny_model, small_config


@pytest.mark.parametrize(("spec", "section"), [(actor_spec, "actor_rollout_ref.model"), (critic_spec, "critic.model")])
def test_attention_cannot_be_overridden_and_other_fields_can(spec, section, tmp_path):
    fields = "{attn_implementation:flash_attention_2,max_position_embeddings:256}"
    model = save_tiny_model(tmp_path / "model")
    config = load_config([f"{section}.path={model}", f"{section}.override_config={fields}"]).config
    made = spec(config, get_device("cpu"))
    made.load_config()
    assert made.override == {"max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("images", "freeze", "towers"),
    [(False, False, ["rests"] * 4), (True, False, ["trained", "trained", "frozen", "rests"]),
     (True, True, ["frozen", "frozen", "frozen", "rests"])],
)  # fmt: skip
def test_towers_work_where_prompts_have_images(images, freeze, towers):
    """The critic's tower is frozen with the policy's; a reward model reads text only."""
    config, device = small_config(), get_device("cpu")
    config.actor_rollout_ref.actor.freeze_vision_tower = freeze
    specs = [make(config, device, images) for make in (actor_spec, critic_spec, frozen_spec)]
    assert [spec.tower for spec in (*specs, reward_model_spec(config, device))] == towers


@pytest.mark.parametrize("images", [False, True])
def test_a_tower_that_only_validation_needs_learns_nothing(images):
    spec = actor_spec(small_config(), get_device("cpu"), images, learns_from_them=False)
    assert spec.tower == ("frozen" if images else "rests")
