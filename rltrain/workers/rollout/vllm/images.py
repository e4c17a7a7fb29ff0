"""Images and videos of a prompt as inputs of vLLM's model, bypassing vLLM's processor.

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

    # Reserve no memory for unused inputs: a cache of processed images, larger or more images, videos. Without any
    # images vLLM does not load the tower.
    rollout, videos = settings.rollout, settings.videos
    most = rollout.limit_images if settings.images else 0
    if settings.images and several_turns(rollout) and rollout.multi_turn.images is not False:
        most = None  # the limit is per prompt, and tools may add more
    limits: dict[str, Any] = {"video": 0} | ({} if most is None else {"image": most})
    family = family_of(settings.model.load_config().model_type) if settings.images else None
    if videos and family and not family.video_times:
        # vLLM reserves memory for this number, and does not compare it with processed inputs.
        limits["video"] = {"count": 1, "num_frames": videos.max_frames}
    arguments: dict[str, Any] = {"limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0}
    bounds = (settings.max_pixels, *([videos.max_pixels] if videos else []))
    if family and family.takes_max_pixels and all(bounds):
        arguments["mm_processor_kwargs"] = {"max_pixels": family.frames_per_image * max(filter(None, bounds))}
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

        placeholders = np.unique(tokens[images.places]).tolist()
        starts, lengths = (numbers.tolist() for numbers in runs(tokens, placeholders))
        places = [PlaceholderRange(*place) for place in zip(starts, lengths, strict=True)]
        inputs: Any = {}
        hashes, ranges = {}, {}
        # To vLLM, a video whose steps are images (`PromptImages`) is these images.
        for kind, is_kind in (("image", images.all_seconds == 0), ("video", images.all_seconds > 0)):
            if numbers := np.flatnonzero(is_kind).tolist():
                inputs |= self._inputs(images, is_kind, kind, placeholders[0])
                hashes[kind], ranges[kind] = [names[i] for i in numbers], [places[i] for i in numbers]
        return {
            "type": "multimodal",
            "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(inputs, self._fields_of(inputs, {})),
            "mm_hashes": hashes,
            "mm_placeholders": ranges,
        }

    def _inputs(self, images: PromptImages, is_kind: np.ndarray, kind: str, placeholder: int) -> dict[str, Any]:
        """Return the inputs of the images, or of the videos, of a request."""
        pixels = images.pixel_values if is_kind.all() else images.pixel_values[is_kind.repeat(images.num_rows)]
        # Copies: vLLM may keep them, and arrays from the object store are read-only.
        values = torch.tensor(pixels, dtype=self._dtype)
        if images.grids is None:
            number = {"image_num_patches": torch.tensor(images.num_rows), "image_token_id": torch.tensor(placeholder)}
            return {"pixel_values": values, **number}
        grids = torch.tensor(images.grids[is_kind])
        if kind == "image":
            return {"pixel_values": values, "image_grid_thw": grids}
        seconds = torch.tensor(images.all_seconds[is_kind], dtype=torch.float32)
        return {"pixel_values_videos": values, "video_grid_thw": grids, "second_per_grid_ts": seconds}
