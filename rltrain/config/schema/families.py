"""Model families that need special treatment, one row per ``model_type``.

Most families have no row: layers, attention, weights and placeholders are found by inspecting the model, and a small
copy is compared with transformers before a run (`run/preflight/model_check.py`). A row holds facts that inspection does
not show. A new special case is a new field.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """Facts about a family."""

    images: bool = False
    """True if its image tokens and positions have been compared with transformers, so that prompts may have images."""
    why_no_images: str = "its image tokens and positions have not been compared with transformers'"
    """Reason for the error if prompts have images anyway."""
    videos: bool = False
    """True if prompts may have videos, compared in the same way."""
    video_times: bool = False
    """True if a text with the time precedes the tokens of each step of a video."""
    mrope: bool = False
    """True if positions of prompts with images have three rows (time, height, width)."""
    takes_max_pixels: bool = False
    """True if its processor shrinks images by ``max_pixels``."""
    frames_per_image: int = 1
    """Frames as which its processor counts an image when it compares pixels with its bounds."""
    gated_delta_nets: bool = False
    """True if its layers of type "linear_attention" are gated delta nets (`models/attention/recurrent.py`)."""
    multiplies_logits: bool = False
    """True if its ``logits_scaling`` multiplies the logits; other families divide by it."""
    closed_layers: str = ""
    """Class of layers that do not pass the keyword arguments of a forward to their attention."""


_BOTH_WAYS = Family(
    why_no_images="the tokens of an image attend to each other in both directions, but packed attention is causal"
)
_DELTA = Family(gated_delta_nets=True)
_MROPE = Family(images=True, mrope=True, takes_max_pixels=True)
_VIDEOS = replace(_MROPE, videos=True)
_TIMES = replace(_VIDEOS, video_times=True)

FAMILIES = {
    "qwen2_vl": _VIDEOS,
    "qwen2_5_vl": _VIDEOS,
    "qwen3_vl": _TIMES,
    "qwen3_vl_moe": _TIMES,
    "qwen3_5": _TIMES,
    "qwen3_5_moe": _TIMES,
    "glm4v": replace(_MROPE, frames_per_image=2),
    "internvl": Family(images=True),
    "gemma3": _BOTH_WAYS,
    "gemma3n": _BOTH_WAYS,
    "paligemma": _BOTH_WAYS,
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "olmo_hybrid": _DELTA,
    "hyperclovax": Family(multiplies_logits=True),
    "nemotron": Family(closed_layers="NemotronDecoderLayer"),
    "stablelm": Family(closed_layers="StableLmDecoderLayer"),
}


def family(model_type: str) -> Family:
    """Return the row of a configuration's ``model_type``, or an empty one."""
    return FAMILIES.get(model_type, Family())
