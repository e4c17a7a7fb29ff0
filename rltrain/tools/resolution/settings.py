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
from rltrain.config.loaded import LoadedConfig
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

    @property
    def label(self) -> str:
        """The name for tables."""
        return f"{self.bounds.name} (default)" if self.is_default else self.bounds.name


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
    _refuse_blind(request, loaded)
    data = loaded.config.data
    default = Bounds(data.min_pixels, data.max_pixels)
    stores = {split: _prompts(request.on(split)) for split in SPLITS}
    for split, store in stores.items():
        _refuse_few(split, request.on(split).data, store)
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


def _refuse_blind(request: SearchRequest, loaded: LoadedConfig) -> None:
    encoder = chat_encoder(loaded.config)
    problem = "" if encoder.has_tower else "sees no images"
    if encoder.has_tower and not encoder.uses_pixel_bounds:
        problem = "its processor scales every image to tiles of one size, whatever the bounds of pixels"
    if problem:
        raise ConfigError(f"model={request.model.named}: {problem}, so there is no resolution to search.")


def _prompts(request: Request) -> PromptStore:
    return load_data(request.settings(request.models[0]).config).prompts["val"]


def _refuse_few(split: str, data: list[str], store: PromptStore) -> None:
    files = ",".join(data)
    if not store.has_images:
        raise DataError(f"{split}={files}: no prompt has an image. data.image_key names the column of images.")
    if len(store) < MIN_PROMPTS:
        raise DataError(
            f"{split}={files}: {count(len(store), 'prompt')} cannot distinguish resolutions. Give at least "
            f"{MIN_PROMPTS}; a few hundred are better."
        )


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
