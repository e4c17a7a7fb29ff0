"""The bounds to try, and the image tokens of each.

The prompts of both splits are tokenised with all bounds before anything is generated. So bounds that make a prompt too
long, or that have the same effect as others, are found within seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rltrain.api import check_settings
from rltrain.common.errors import ConfigError, DataError
from rltrain.common.logs import count
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import PromptStore
from rltrain.run.splits import load_data
from rltrain.tools.evaluate.request import Request
from rltrain.tools.resolution.request import Bounds, SearchRequest

# With fewer prompts, intervals are too wide to compare settings.
MIN_PROMPTS = 20
SPLITS = ("dev", "test")


@dataclass(frozen=True)
class Setting:
    """Bounds to try."""

    bounds: Bounds
    tokens: float
    """Image tokens, mean per prompt of the development split."""
    is_default: bool = False


@dataclass(frozen=True)
class Settings:
    """The default, then all others from cheap to expensive."""

    tried: list[Setting]
    notes: list[str]
    num_prompts: int
    """Prompts of the development split."""


def find_settings(request: SearchRequest) -> Settings:
    """Return the settings to try. Raises ConfigError and DataError for a model, data or bounds that allow no search."""
    loaded = request.on("dev").settings(request.model)
    check_settings(loaded)
    encoder, data = chat_encoder(loaded.config), loaded.config.data
    if not (encoder.has_tower and encoder.uses_pixel_bounds):
        why = "its processor scales every image to tiles of one size" if encoder.has_tower else "it sees no images"
        raise ConfigError(f"model={request.model.named}: {why}, so there is no resolution to search.")
    default = Bounds(data.min_pixels, data.max_pixels)
    stores = {split: _prompts(request.on(split)) for split in SPLITS}
    for split, store in stores.items():
        if not store.has_images or len(store) < MIN_PROMPTS:
            raise DataError(
                f"{split}={','.join(request.on(split).data)}: {count(len(store), 'prompt')}"
                f"{' with' if store.has_images else ', none with'} images. Give at least {MIN_PROMPTS}."
            )
    tokens = stores["dev"].image_tokens
    notes, tried = list[str](), [Setting(default, float(tokens.mean()), is_default=True)]
    known = {tokens.tobytes(): default}
    is_named = bool(request.least or request.most)
    for bounds in _named(request, default) if is_named else _around(stores["dev"]):
        try:
            tokens, _ = (_prompts(request.on(split, bounds)).image_tokens for split in SPLITS)
        except DataError as error:
            if is_named:
                raise ConfigError(f"{' '.join(bounds.words)}: {error}") from error
            notes.append(f"{bounds.name} is left out: {error}")
            continue
        if (same := known.setdefault(tokens.tobytes(), bounds)) != bounds:
            notes.append(f"{bounds.name} is left out: every image gets the size that it has with {same.name}")
        elif bounds != default:
            tried.append(Setting(bounds, float(tokens.mean())))
    if len(tried) < 2:
        raise ConfigError("\n".join(["there is nothing to search: only the default bounds are left.", *notes]))
    return Settings(sorted(tried, key=lambda each: (not each.is_default, each.tokens)), notes, len(stores["dev"]))


def _prompts(request: Request) -> PromptStore:
    return load_data(request.settings(request.models[0]).config).prompts["val"]


def _named(request: SearchRequest, default: Bounds) -> Iterator[Bounds]:
    """Yield every combination of the bounds that the command names."""
    for least in request.least or [default.least]:
        for most in request.most or [default.most]:
            if least is None or most is None or least <= most:
                yield Bounds(least, most)


def _around(store: PromptStore) -> Iterator[Bounds]:
    """Yield bounds with fewer and more pixels than the images have by default."""
    assert store.encoder
    has = store.num_images > 0
    pixels = float(np.median(store.image_tokens[has] / store.num_images[has])) * store.encoder.pixels_per_token
    yield from (Bounds(None, round(pixels * share)) for share in (1 / 4, 1 / 2))
    yield from (Bounds(round(pixels * factor), None) for factor in (2, 4))
