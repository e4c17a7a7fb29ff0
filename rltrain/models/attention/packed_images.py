"""Images of a packed row: encoded once per prompt, with the features copied to all placeholders.

A prompt with an image has many responses, and the vision tower costs more than the prompt's tokens. Therefore the
pixels of a prompt are stored once, and features are reused: the gradients of all responses are summed in one backward
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rltrain.data.images import PromptImages


@dataclass(frozen=True)
class PackedImages:
    """Images of a row, on the host."""

    pixel_values: Tensor
    """[rows, ...] of all images (see `PromptImages`)."""
    grids: Tensor | None
    """[images, 3] (see `PromptImages`)."""
    num_rows: Tensor
    """[images]: rows of pixels per image."""
    num_tokens: Tensor
    """[images]: features per image."""
    places: Tensor
    """[n], ascending: row indices of the placeholder tokens."""
    features: Tensor
    """[n]: feature index for each placeholder, counted over all images."""

    @classmethod
    def of(cls, laid: Sequence[tuple[PromptImages, int]], spans: Sequence[range] | None = None) -> PackedImages | None:
        """Build from ``laid``: the images of each text and the row index of its first token, in row order. spans: the
        row indices of each text's tokens, if only some of them are in the row (None: all).
        """
        if not laid:
            return None
        # Texts with the same prompt share their pixels but have separate placeholders.
        distinct = {id(images.pixel_values): images for images, _ in laid}
        first, total = {}, 0
        for key, images in distinct.items():
            first[key], total = total, total + len(images.places)
        distinct_images = list(distinct.values())
        # `torch.tensor` copies: arrays from the object store are read-only, and torch warns if it shares their memory.
        places = [torch.tensor(images.places) + start for images, start in laid]
        features = [torch.arange(len(images.places)) + first[id(images.pixel_values)] for images, _ in laid]
        if spans is not None:
            there = [(at >= span.start) & (at < span.stop) for at, span in zip(places, spans, strict=True)]
            places = [at[is_there] for at, is_there in zip(places, there, strict=True)]
            features = [number[is_there] for number, is_there in zip(features, there, strict=True)]
        grids = [images.grids for images in distinct_images if images.grids is not None]
        return cls(
            torch.from_numpy(np.concatenate([images.pixel_values for images in distinct_images])),
            torch.from_numpy(np.concatenate(grids)) if grids else None,
            torch.from_numpy(np.concatenate([images.num_rows for images in distinct_images])),
            torch.from_numpy(np.concatenate([images.num_tokens for images in distinct_images])),
            torch.cat(places),
            torch.cat(features),
        )

    def within(self, start: int, length: int) -> PackedImages | None:
        """Return the images that have tokens in a slice, with indices relative to its start, or None."""
        rows = ((self.places >= start) & (self.places < start + length)).nonzero()[:, 0]
        features = self.features[rows]
        owner = torch.arange(len(self.num_tokens)).repeat_interleave(self.num_tokens)
        image_numbers = owner[features].unique()
        if not len(image_numbers):
            return None
        is_kept = torch.zeros(len(self.num_tokens), dtype=torch.bool)
        is_kept[image_numbers] = True
        # The features keep their order. The new index of a feature is therefore the number of kept features before it.
        number = is_kept[owner].cumsum(0) - 1
        return replace(
            self,
            pixel_values=self.pixel_values[is_kept.repeat_interleave(self.num_rows)],
            grids=None if self.grids is None else self.grids[is_kept],
            num_rows=self.num_rows[is_kept],
            num_tokens=self.num_tokens[is_kept],
            places=self.places[rows] - start,
            features=number[features],
        )
