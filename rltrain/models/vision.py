"""Models with a vision tower: image settings of their configuration, the tower's modules, and the forward with images.

transformers' forward would encode an image once per response, and derive positions from the tokens of one sample.
Therefore the tower is called here, once for all images of a packed row, and the decoder gets embeddings. Under FSDP
every rank must call every module, so for a row without images a blank image is encoded and its features are multiplied
by 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rltrain.common.device import send
from rltrain.models.attention.packed_images import PackedImages

_KINDS = ("image", "video", "vision", "audio", "boi", "eoi")


def takes_images(config: PretrainedConfig) -> bool:
    """Return whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def placeholder_ids(config: PretrainedConfig) -> list[int]:
    """Return the token ids that mark or represent an image, a video or sound, ascending.

    They are not text: if one were in a response, the training forward would need features of an image that does not
    exist.
    """
    fields = vars(config).items()
    return sorted(
        {id for name, id in fields if name.startswith(_KINDS) and name.endswith("_token_id") and isinstance(id, int)}
    )


def language_model(model: PreTrainedModel) -> nn.Module:
    """Return the decoder, or the whole model without its head if there is no tower."""
    return getattr(model.base_model, "language_model", model.base_model)


def tower(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that compute and project image features; [] for a text model."""
    language = language_model(model)
    return (
        []
        if language is model.base_model
        else [child for child in model.base_model.children() if child is not language]
    )


def tower_numbers(model: PreTrainedModel) -> dict[str, float]:
    """Return the cost of the tower, from its configuration and weights.

    row_flops: FLOPs of a forward per row of pixels (patch or tile); pair_flops: per (query, key) pair of rows of one
    image. A weight takes 2 FLOPs, and a pair of patches 4 per layer and channel, in both directions (Narayanan et al.
    2021, appendix). Windowed layers count full windows, and a tile is one window. row_tokens: image tokens per row.
    backward_share: FLOPs of the update (forward, gradients of activations and of weights) relative to training all
    weights.
    """
    vision: Any = model.config.vision_config
    merge = getattr(vision, "spatial_merge_size", None)
    # In the config of Qwen2-VL's tower, `hidden_size` is the size of the decoder.
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    share = 1 / merge**2 if merge else model.config.downsample_ratio**2
    weights = trained = total = 0.0
    for part_name, part in model.base_model.named_children():
        if part is language_model(model):
            continue
        total += sum(parameter.numel() for parameter in part.parameters())
        trained += sum(parameter.numel() for parameter in part.parameters() if parameter.requires_grad)
        for name, layer in part.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d):
                # A projector processes each feature once, and a feature consists of several patches.
                is_after = "merger" in name or "projector" in part_name
                weights += layer.weight.numel() * (share if is_after else 1)
    both = {"backward_share": (1 + (trained > 0) + trained / total) / 3, "row_tokens": share}
    if merge is None:
        patches = math.prod(vision.image_size) // math.prod(vision.patch_size)
        row = patches * (2 * weights + 4 * width * layers * patches)
        return both | {"row_flops": row, "pair_flops": 0.0, "row_tokens": patches * share}
    whole = len(getattr(vision, "fullatt_block_indexes", None) or range(layers))
    window = (getattr(vision, "window_size", 0) // vision.patch_size) ** 2
    row = 2 * weights + 4 * width * (layers - whole) * window
    return both | {"row_flops": row, "pair_flops": 4.0 * width * whole}


def image_cost(
    sizes: Mapping[str, float], rows: NDArray[np.int64], images: NDArray[np.int64], *, updates: bool
) -> NDArray[np.float64]:
    """Return the cost [n] in tokens of n prompts with ``rows`` [n] in ``images`` [n].

    sizes: of the model, including `tower_numbers`. Exact if the images of a prompt have equal sizes, else a slight
    underestimate.
    """
    flops = sizes["row_flops"] * rows + sizes["pair_flops"] * rows**2 / np.maximum(images, 1)
    return (sizes["backward_share"] if updates else 1.0) * flops / (2 * sizes["matmul_parameters"])


def read_with_images(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, images: PackedImages | None, **arguments: Any
) -> Tensor:
    """Compute the last hidden states [total, hidden] of a packed row, with image features at its placeholders.

    tokens [total]; positions [total] or [3, total]; ``arguments`` go to the decoder. Qwen3-VL's deepstack features are
    added in their layers.
    """
    embeddings = model.get_input_embeddings()(tokens)
    pixels, grids = _blank(model) if images is None else (images.pixel_values, images.grids)
    features, deep = _encode(model, send(pixels, tokens.device).to(embeddings.dtype), grids)
    if images is None:
        # The features must be in the graph, because the backward pass of the tower is a collective as well.
        for tensor in (features, *deep):  # a sum in half precision may overflow
            embeddings = embeddings + (0.0 * tensor.float().sum()).to(embeddings.dtype)
    else:
        places, order = send(images.places, tokens.device), send(images.features, tokens.device)
        embeddings = embeddings.index_copy(0, places, features[order].to(embeddings.dtype))
        if deep:
            is_image = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
            is_image[places] = True
            # The features are in the order in which the decoder reads the mask, because placeholders are ascending.
            arguments["visual_pos_masks"] = is_image[None]
            arguments["deepstack_visual_embeds"] = [layer_features[order] for layer_features in deep]
    rows = positions[:, None] if positions.dim() == 2 else positions[None]
    decoder = language_model(model)
    return decoder(inputs_embeds=embeddings[None], position_ids=rows, **arguments).last_hidden_state[0]


def _encode(model: PreTrainedModel, pixels: Tensor, grids: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Encode all images. Returns features [n, hidden] and the features for the first decoder layers (deepstack)."""
    base: Any = model.base_model
    trains = any(parameter.requires_grad for part in tower(model) for parameter in part.parameters())
    where = {} if grids is None else {"image_grid_thw": send(grids, pixels.device)}
    # No activations are saved for a frozen tower.
    with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
        output = base.get_image_features(pixel_values=pixels, return_dict=True, **where)
    features = output.pooler_output
    # Qwen families return a tensor per image, others a single [tiles, tokens, hidden].
    features = features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(list(features))
    # One tensor for all images (transformers 5.5), or one per image.
    deep = getattr(output, "deepstack_features", None) or ()
    return features, [
        layer_features if isinstance(layer_features, Tensor) else torch.cat(list(layer_features))
        for layer_features in deep
    ]


def _blank(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Return the pixels of the smallest image that the tower accepts, and its grid."""
    vision: Any = model.config.vision_config
    merge = getattr(vision, "spatial_merge_size", None)
    if merge is None:  # tiles of one size
        return torch.zeros(1, vision.num_channels, *vision.image_size), None
    size = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(merge * merge, size), torch.tensor([[1, merge, merge]])
