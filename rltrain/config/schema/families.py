"""Families of models, one row per ``model_type`` of which something must be known by name.

Most families have no row: layers, attention, weights and placeholders are found by looking at the model, and a small
copy of it is compared with transformers before a run (`run/preflight/model_check.py`). A row says what no look tells.
The code that a row switches on asks for it here; a new quirk is a field.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """What is known of a family by its name."""

    images: bool = False
    """Its image tokens and positions have been compared with transformers', so prompts may have images."""
    why_no_images: str = "nobody has compared its image tokens and positions with transformers'"
    """Said where prompts have images all the same."""
    mrope: bool = False
    """Positions of prompts with images have three rows (time, height, width)."""
    takes_max_pixels: bool = False
    """Its processor shrinks an image by ``max_pixels``."""
    gated_delta_nets: bool = False
    """Its layers of kind "linear_attention" are gated delta nets (`models/attention/recurrent.py`)."""
    multiplies_logits: bool = False
    """Its ``logits_scaling`` multiplies the logits; others divide by it."""
    closed_layers: str = ""
    """The class of layers that keep the keyword arguments of a forward from their attention."""


_BOTH_WAYS = Family(
    why_no_images="the tokens of an image see each other in both directions, and the attention of packed prompts is "
    "causal"
)
_DELTA = Family(gated_delta_nets=True)
_MROPE = Family(images=True, mrope=True, takes_max_pixels=True)

FAMILIES = {
    "qwen2_vl": _MROPE,
    "qwen2_5_vl": _MROPE,
    "qwen3_vl": _MROPE,
    "qwen3_vl_moe": _MROPE,
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
    """The row of a configuration's ``model_type``, or an empty one."""
    return FAMILIES.get(model_type, Family())
