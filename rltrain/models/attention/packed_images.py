"""The images of a packed row: encoded once per prompt, their features laid wherever the prompt's tokens stand.

A prompt with an image has many answers, and the tower costs more than the prompt's tokens. So the pixels of a prompt
stand here once, and a feature may be laid several times: gradients of all answers then add up in one backward pass.
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
    """The images of a row, all of it on the host."""

    pixel_values: Tensor
    """[rows, ...] of all images (see `PromptImages`)."""
    grids: Tensor | None
    """[images, 3], likewise."""
    num_rows: Tensor
    """[images]: rows of pixels."""
    num_tokens: Tensor
    """[images]: features."""
    places: Tensor
    """[n], ascending: the tokens of the row that are placeholders."""
    features: Tensor
    """[n]: the number of the feature that goes there, counted over all images."""

    @classmethod
    def of(cls, laid: Sequence[tuple[PromptImages, int]], spans: Sequence[range] | None = None) -> PackedImages | None:
        """laid: the images of a text, and where its tokens begin in the row, in the order of the row.

        spans: the places of the row that each text has, where not all of its tokens are there; None: all are.
        """
        if not laid:
            return None
        # Texts that begin alike share their pixels and have places of their own.
        distinct = {id(images.pixel_values): images for images, _ in laid}
        first, total = {}, 0
        for key, images in distinct.items():
            first[key], total = total, total + len(images.places)
        distinct_images = list(distinct.values())
        # `tensor` copies: arrays that come out of the object store must not be written to, of which torch warns.
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
        """The images that have tokens in a slice of the row, places counted from its start; None where none has."""
        rows = ((self.places >= start) & (self.places < start + length)).nonzero()[:, 0]
        features = self.features[rows]
        owner = torch.arange(len(self.num_tokens)).repeat_interleave(self.num_tokens)
        image_numbers = owner[features].unique()
        if not len(image_numbers):
            return None
        is_kept = torch.zeros(len(self.num_tokens), dtype=torch.bool)
        is_kept[image_numbers] = True
        # Features keep their order, so the number of one among the kept is how many kept ones come before it.
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
