"""What a model's configuration says of images."""

from __future__ import annotations

from transformers import PretrainedConfig

_KINDS = ("image", "video", "vision", "audio", "boi", "eoi")


def takes_images(config: PretrainedConfig) -> bool:
    """Whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def placeholder_ids(config: PretrainedConfig) -> list[int]:
    """Token ids that mark or stand for an image, a video or sound, ascending.

    They are no text: in an answer they would ask the training forward for features of an image that is not there.
    """
    fields = vars(config).items()
    return sorted(
        {id for name, id in fields if name.startswith(_KINDS) and name.endswith("_token_id") and isinstance(id, int)}
    )
