"""Images of a prompt as inputs of vLLM's model, bypassing vLLM's processor.

vLLM would open, scale and crop every image again, with different code and once per process. With the trainer's pixels
and tokens, engine and trainer cannot differ, and each image is processed only once. vLLM accepts such an input as
already processed (`EngineInput`, since vllm 0.17).
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
    """Return vLLM's arguments for a model with a vision tower."""
    from vllm.engine.arg_utils import EngineArgs

    # Reserve no memory for unused inputs: videos, a cache of processed images, larger or more images. Without any
    # images vLLM does not load the tower.
    rollout = settings.rollout
    most = rollout.limit_images if settings.images else 0
    if settings.images and several_turns(rollout) and rollout.multi_turn.images is not False:
        most = None  # the limit is per prompt, and tools may add more
    limits = {"video": 0} | ({} if most is None else {"image": most})
    arguments: dict[str, Any] = {"limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0}
    if settings.images and settings.max_pixels:
        family = family_of(settings.model.load_config().model_type)
        if family.takes_max_pixels:
            arguments["mm_processor_kwargs"] = {"max_pixels": family.frames_per_image * settings.max_pixels}
    # The trainer's pixels are already normalised. vllm 0.32 would normalise them again in its model; earlier versions
    # lack the argument.
    argument = "mm_device_do_normalize"
    return arguments | ({argument: False} if argument in EngineArgs.__dataclass_fields__ else {})


class ImageInput:
    """Builder of image inputs for one engine. model_config: vLLM's model config. dtype: the model's dtype."""

    def __init__(self, model_config: Any, dtype: torch.dtype) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        # Only the processor knows which fields of the model belong to which image.
        self._fields_of = MULTIMODAL_REGISTRY.create_processor(model_config)._get_mm_fields_config
        self._dtype = dtype

    def of(self, tokens: np.ndarray, images: PromptImages, names: Sequence[str]) -> dict[str, Any]:
        """Return the image inputs of a request. tokens [n] of the text, with all placeholders.

        names: unique per image. vLLM encodes images with the same name once, and shares the prefix cache after them.
        """
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        placeholder = int(tokens[images.places[0]])
        # Copies: vLLM may keep them, and arrays from the object store are read-only.
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
