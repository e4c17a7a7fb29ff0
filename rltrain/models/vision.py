"""Models with a vision tower: what their configuration says of images, and where the tower is."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

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


def language_model(model: PreTrainedModel) -> nn.Module:
    """The part that reads tokens: the decoder, or the whole model without its head where there is no tower."""
    return getattr(model.base_model, "language_model", model.base_model)


def tower(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that make features of images, with what projects them; none in a model of text."""
    language = language_model(model)
    return (
        [] if language is model.base_model else [each for each in model.base_model.children() if each is not language]
    )
