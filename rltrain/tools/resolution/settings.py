"""Which bounds are tried, and how many tokens the images take in each.

Everything is looked at before anything is answered: the prompts of both splits are tokenised with all bounds, so bounds
under which a prompt is too long, or which scale no image differently, are found within seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rltrain.api import look_over
from rltrain.base.errors import ConfigError, DataError
from rltrain.base.logs import count
from rltrain.config.loaded import LoadedConfig
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import PromptStore
from rltrain.run.splits import load_data
from rltrain.tools.evaluate.request import Request
from rltrain.tools.resolution.request import Bounds, SearchRequest

# With fewer no interval says anything.
MIN_PROMPTS = 20
# Of the pixels that an image has by default.
_SMALLER, _LARGER = (1 / 4, 1 / 2), (2, 4)
SPLITS = ("dev", "test")


@dataclass(frozen=True)
class Setting:
    """Bounds that are tried."""

    bounds: Bounds
    tokens: float
    """Of images, mean per prompt of the development split."""
    is_default: bool = False

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.bounds.name

    @property
    def label(self) -> str:
        """In tables."""
        return f"{self.name} (default)" if self.is_default else self.name


@dataclass(frozen=True)
class Settings:
    """The default, then all others, the cheapest first."""

    tried: list[Setting]
    notes: list[str]
    num_prompts: int
    """Of the development split."""


def find_settings(request: SearchRequest) -> Settings:
    """The settings to try. Raises ConfigError and DataError for a model, data or bounds that allow no search."""
    loaded = request.on("dev").settings(request.model)
    look_over(loaded)
    _refuse_blind(request, loaded)
    data = loaded.config.data
    default = Bounds(data.min_pixels, data.max_pixels)
    stores = {split: _prompts(request.on(split)) for split in SPLITS}
    for split, store in stores.items():
        _refuse_few(split, request.on(split).data, store)
    notes, tried = list[str](), [Setting(default, _mean_tokens(stores["dev"]), is_default=True)]
    known = {_tokens(stores["dev"]): default}
    is_named = bool(request.least or request.most)
    for bounds in _named(request, default) if is_named else _around(stores["dev"]):
        if bounds == default:
            continue
        found = {split: _prompts_that_fit(request.on(split, bounds)) for split in SPLITS}
        if problem := _problem(request, found, stores):
            if is_named:
                raise ConfigError(f"{' '.join(bounds.words)}: {problem}")
            notes.append(f"{bounds.name} is left out: {problem}")
            continue
        prompts = found["dev"]
        assert prompts
        if same := known.get(_tokens(prompts)):
            notes.append(f"{bounds.name} is left out: every image gets the size that it has with {same.name}")
            continue
        known[_tokens(prompts)] = bounds
        tried.append(Setting(bounds, _mean_tokens(prompts)))
    if len(tried) < 2:
        raise ConfigError(
            "\n".join(["there is nothing to search: no other bounds are left beside the default.", *notes])
        )
    tried[1:] = sorted(tried[1:], key=lambda setting: setting.tokens)
    return Settings(tried, notes, len(stores["dev"]))


def _refuse_blind(request: SearchRequest, loaded: LoadedConfig) -> None:
    encoder = chat_encoder(loaded.config)
    if not encoder.has_tower:
        raise ConfigError(f"model={request.model.named} sees no images, so there is no resolution to search.")
    try:
        encoder.can_see()
    except DataError as error:
        raise ConfigError(f"model={request.model.named}: {error}") from error
    if not encoder.heeds_bounds:
        raise ConfigError(
            f"model={request.model.named}: its processor scales every image to tiles of one size, whatever the bounds "
            "of pixels, so there is no resolution to search."
        )


def _prompts(request: Request) -> PromptStore:
    return load_data(request.settings(request.models[0]).config).prompts["val"]


def _prompts_that_fit(request: Request) -> PromptStore | None:
    """Prompts that are not too long, where a run may end at the first that is; None where all are."""
    try:
        return _prompts(replace(request, words=[*request.words, "data.filter_overlong_prompts=True"]))
    except DataError:
        return None


def _refuse_few(split: str, data: list[str], store: PromptStore) -> None:
    files = ",".join(data)
    if not store.has_images:
        raise DataError(f"{split}={files}: no prompt has an image. data.image_key names the column of images.")
    if len(store) < MIN_PROMPTS:
        raise DataError(
            f"{split}={files}: {count(len(store), 'prompt')} cannot tell one resolution from another. Give "
            f"{MIN_PROMPTS} at least; some hundreds are better."
        )


def _problem(request: SearchRequest, found: dict[str, PromptStore | None], default: dict[str, PromptStore]) -> str:
    """Why the prompts are not those of the default bounds; empty where they are."""
    for split, store in found.items():
        if store is None or not np.array_equal(store.row_index, default[split].row_index):
            longest = request.on(split).settings(request.model).config.data.max_prompt_length
            return (
                f"prompts of {split}= would be longer than data.max_prompt_length={longest}. Raise it, or take smaller "
                "images."
            )
    return ""


def _named(request: SearchRequest, default: Bounds) -> Iterator[Bounds]:
    """Every combination of the bounds that the command names."""
    for least in request.least or [default.least]:
        for most in request.most or [default.most]:
            if least is None or most is None or least <= most:
                yield Bounds(least, most)


def _around(store: PromptStore) -> Iterator[Bounds]:
    """Fewer and more pixels than the images have by default."""
    assert store.encoder
    has = store.num_images > 0
    pixels = float(np.median(store.image_tokens[has] / store.num_images[has])) * store.encoder.pixels_per_token
    yield from (Bounds(None, round(pixels * share)) for share in _SMALLER)
    yield from (Bounds(round(pixels * share), None) for share in _LARGER)


def _tokens(store: PromptStore) -> bytes:
    return store.image_tokens.tobytes()


def _mean_tokens(store: PromptStore) -> float:
    return float(store.image_tokens.mean())
