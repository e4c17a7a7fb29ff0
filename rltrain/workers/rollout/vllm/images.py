"""The images of a prompt as vLLM's model takes them, in place of what vLLM's own processor would make of an image.

vLLM would open, scale and cut every image again, by its own code and once per process. Given the trainer's pixels
and tokens, engine and trainer cannot differ in them, and an image is processed once. vLLM takes such an input as one
that has been through its processor (`EngineInput`, since vllm 0.17).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rltrain.config.agents import several_turns
from rltrain.data.images import PromptImages, family_of, runs
from rltrain.workers.rollout.settings import EngineSettings


def image_arguments(settings: EngineSettings) -> dict[str, Any]:
    """The arguments of a vLLM whose model has a vision tower."""
    from vllm.engine.arg_utils import EngineArgs

    # No memory is reserved for what never comes: videos, a cache of processed images, larger or more images; and
    # without any, vLLM leaves the tower out.
    rollout = settings.rollout
    most = rollout.limit_images if settings.images else 0
    if settings.images and several_turns(rollout) and rollout.multi_turn.images is not False:
        most = None  # what is counted is a prompt's, and tools may show more
    limits = {"video": 0} | ({} if most is None else {"image": most})
    arguments: dict[str, Any] = {"limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0}
    if settings.images and settings.max_pixels and family_of(settings.model.load_config().model_type).takes_max_pixels:
        arguments["mm_processor_kwargs"] = {"max_pixels": settings.max_pixels}
    # The trainer's pixels are normalized. vllm 0.32 would do it in its model, earlier ones have no such argument.
    argument = "mm_device_do_normalize"
    return arguments | ({argument: False} if argument in EngineArgs.__dataclass_fields__ else {})


class ImageInput:
    """Makes the inputs of one engine. model_config: vLLM's; dtype: that of the model."""

    def __init__(self, model_config: Any, dtype: torch.dtype) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        # It alone knows which fields of the model belong to which image.
        self._fields_of = MULTIMODAL_REGISTRY.create_processor(model_config)._get_mm_fields_config
        self._dtype = dtype

    def of(self, tokens: np.ndarray, images: PromptImages, names: Sequence[str]) -> dict[str, Any]:
        """What a request has beside its token ids. tokens [n] of the text, with all placeholders.

        names: of each image, and of no other. Under one name vLLM encodes it once, and shares what it computes behind.
        """
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        placeholder = int(tokens[images.places[0]])
        # Copies: vLLM may keep them, and arrays from the object store are not to be written to.
        inputs: Any = {"pixel_values": torch.tensor(images.pixel_values, dtype=self._dtype)}
        if images.grids is None:
            inputs |= {"image_num_patches": torch.tensor(images.num_rows), "image_token_id": torch.tensor(placeholder)}
        else:
            inputs["image_grid_thw"] = torch.tensor(images.grids)
        starts, lengths = (numbers.tolist() for numbers in runs(tokens, placeholder))
        return {
            "type": "multimodal",
            "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(inputs, self._fields_of(inputs, {})),
            "mm_hashes": {"image": list(names)},
            "mm_placeholders": {"image": [PlaceholderRange(*place) for place in zip(starts, lengths, strict=True)]},
        }
