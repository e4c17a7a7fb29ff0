"""Tokens and pixels that a processor of transformers makes of images and videos.

The tokens depend only on the sizes of images and videos, which are known before they are decoded. Pixels are compared
with the tokens when they are computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from rltrain.common.errors import DataError
from rltrain.config.schema.families import Family
from rltrain.data.images import EncodedPrompt, PromptImages, blank_image, mrope_positions, one_array, runs
from rltrain.data.loading import replaces_video_token
from rltrain.data.media.videos import Clip, Video, count_media


class MediaProcessor:
    """A processor and tokenizer of transformers. path: their folder. config: the model's configuration."""

    def __init__(self, path: str, processor: Any, tokenizer: Any, family: Family, config: Any) -> None:
        self.path, self.processor, self.tokenizer = path, processor, tokenizer
        self._family, self._config = family, config

    @cached_property
    def unit(self) -> int:
        """Side length of an image token in pixels."""
        of_processor = self.processor.image_processor
        return int(getattr(of_processor, "patch_size", 1) * getattr(of_processor, "merge_size", 1))

    @cached_property
    def placeholders(self) -> tuple[int, ...]:
        """Token ids of image tokens and, if the family's videos can be trained on, of video tokens."""
        ids = (self.processor.image_token_id,)
        return (*ids, self.processor.video_token_id) if self._family.videos else ids

    def num_rows(self, size: Any) -> int:
        """Return the rows of pixels (patches or tiles) that the processor makes of an image or video of this
        `bounded_size`.

        Raises DataError if it rejects the image.
        """
        if size not in self._known_sizes:
            try:
                self._known_sizes[size] = self._count_rows(size)
            except ValueError as error:
                raise DataError(f"the processor of {self.path!r} rejects the images: {error}") from error
        return self._known_sizes[size]

    def _count_rows(self, size: Any) -> int:
        processor = self.processor
        if isinstance(size, Clip):
            shape = (len(size.indices), size.height, size.width)
            tokens = processor._get_num_multimodal_tokens(video_sizes=[shape])["num_video_tokens"][0]
            return int(tokens) * processor.video_processor.merge_size**2
        return int(processor._get_num_multimodal_tokens(image_sizes=[size[::-1]])["num_image_patches"][0])

    def count_images(self, sizes: Sequence[Any]) -> int:
        """Return the number of images, with one for each step in time of a video."""
        return sum(len(self._times(size)) if isinstance(size, Clip) else 1 for size in sizes)

    def _times(self, clip: Clip) -> list[float]:
        """Return the time of each step of a video, in seconds."""
        return clip.times(self.processor.video_processor.temporal_patch_size)

    @cached_property
    def _known_sizes(self) -> dict[Any, int]:
        return {}

    def expand(self, text: str, sizes: Sequence[Any]) -> list[int]:
        """Tokenize a text with a placeholder per image and video, and repeat the placeholders."""
        num_images, num_videos = count_media(sizes)
        for kind, number in (("image", num_images), ("video", num_videos)):
            token = getattr(self.processor, f"{kind}_token", None)
            if token and (given := text.count(token)) != number:
                raise DataError(
                    f"the conversation has {token} {given} times for {number} {kind}s: the text contains it, or the "
                    f"chat template does not support {kind}s."
                )
        images, clips = iter(sizes[:num_images]), iter(sizes[num_images:])
        slots = [self.processor.image_token, *([self._video_slot] if num_videos else [])]
        pieces, rows = re.split(f"({'|'.join(map(re.escape, slots))})", text), list[int]()
        for place, piece in enumerate(pieces):
            if piece == slots[0]:
                rows.append(self.num_rows(next(images)))
            elif piece in slots:
                pieces[place], of_video = self._video_text(next(clips))
                rows += of_video
        return self.expand_ids(self.tokenizer("".join(pieces), add_special_tokens=False)["input_ids"], rows)

    def _video_text(self, clip: Clip) -> tuple[str, list[int]]:
        """Return the text of a video, and the rows of pixels for each of its placeholders."""
        if not self._family.video_times:
            return self._video_slot, [self.num_rows(clip)]
        times = self._times(clip)
        text = "".join(f"<{time:.1f} seconds>{self._video_step}" for time in times)
        return text, [self.num_rows(clip) // len(times)] * len(times)

    @property
    def _video_step(self) -> str:
        processor = self.processor
        return f"{processor.vision_start_token}{processor.video_token}{processor.vision_end_token}"

    @cached_property
    def _video_slot(self) -> str:
        """Text that the processor replaces by the tokens of a video."""
        is_token = not self._family.video_times or replaces_video_token(self.processor)
        return self.processor.video_token if is_token else self._video_step

    def expand_ids(self, ids: Sequence[int], num_rows: Sequence[int]) -> list[int]:
        """Repeat each placeholder in ``ids`` for its rows of pixels. Raises DataError for adjacent placeholders."""
        before, after, tokens_of_a_row = self._frame
        token_ids: list[int] = []
        sizes = iter(num_rows)
        for token in ids:
            if token not in self.placeholders:
                token_ids.append(token)
                continue
            if token_ids and token_ids[-1] == token and not before:
                raise DataError(
                    "the chat template puts images directly next to each other, without a token in between."
                )
            token_ids += [*before, *[token] * int(next(sizes) * tokens_of_a_row), *after]
        return token_ids

    @cached_property
    def _frame(self) -> tuple[list[int], list[int], Fraction]:
        """Tokens that the processor adds before and after the tokens of an image, and tokens per row of pixels."""
        features = self._processed(self.processor.image_token, [blank_image()])
        ids, token = features["input_ids"][0].tolist(), self.processor.image_token_id
        number, first = ids.count(token), ids.index(token)
        return ids[:first], ids[first + number :], Fraction(number, len(features["pixel_values"]))

    def _processed(self, text: str, images: Sequence[Any], videos: Sequence[Video] = ()) -> Any:
        arguments: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": False}
        if videos:
            arguments |= {"videos": [video.frames.transpose(0, 3, 1, 2) for video in videos]}
            arguments |= {"video_metadata": [video.size.metadata for video in videos], "do_sample_frames": False}
        try:
            return self.processor(text=[text], images=list(images) or None, **arguments)
        except ValueError as error:
            raise DataError(f"the processor of {self.path!r} rejects the images: {error}") from error

    def with_pixels(self, tokens: np.ndarray, images: Sequence[Any]) -> EncodedPrompt:
        """Compute pixels, grids and positions of a prompt.

        tokens [n]: from `expand`. images: from `open_images`. Raises DataError if the two do not match.
        """
        processor, placeholders = self.processor, self.placeholders
        videos = [image for image in images if isinstance(image, Video)]
        stills = [image for image in images if not isinstance(image, Video)]
        text = processor.image_token * len(stills) + (self._video_slot * len(videos) if videos else "")
        features = self._processed(text, stills, videos)
        self._check_times(features, videos)
        starts, num_tokens = runs(tokens, placeholders)
        # The processor returns the images before the videos. Here they have the order of the text.
        by_kind = np.argsort(tokens[starts] != placeholders[0], kind="stable")
        names = ("pixel_values", "pixel_values_videos")
        pixels = one_array([features[name].numpy() for name in names if name in features])
        grids, seconds = self._grids(features)
        num_rows = num_tokens * len(pixels) // num_tokens.sum() if grids is None else grids.prod(1)
        expected = [int(rows * self._frame[2]) for rows in num_rows.tolist()]
        if expected != num_tokens[by_kind].tolist() or num_rows.sum() != len(pixels):
            raise DataError(
                f"its images take {expected} tokens, but the prompt has {num_tokens[by_kind].tolist()} placeholders: "
                "the images have changed since the run was started, or the processor contradicts its own token counts."
            )
        if grids is not None and seconds is not None and stills:
            order = np.argsort(by_kind)
            blocks = np.split(pixels, np.cumsum(num_rows)[:-1])
            pixels = np.concatenate([blocks[place] for place in order])
            num_rows, grids, seconds = num_rows[order], grids[order], seconds[order]
        seconds = seconds if seconds is not None and seconds.any() else None
        places, positions = np.flatnonzero(np.isin(tokens, placeholders)), self._positions(tokens, grids, seconds)
        prompt_images = PromptImages(pixels, grids, num_rows, num_tokens, places, positions, seconds)
        return EncodedPrompt(tokens, prompt_images)

    def _positions(self, tokens: np.ndarray, grids: np.ndarray | None, seconds: np.ndarray | None) -> np.ndarray | None:
        """Return positions [3, n], or None for a family with plain ones."""
        if not self._family.mrope or grids is None:
            return None
        steps, per_second = None, getattr(self._config.vision_config, "tokens_per_second", None)
        if seconds is not None and per_second:  # Qwen2-VL: every step counts as 1
            steps = np.where(seconds > 0, seconds * per_second, 1.0)
        return mrope_positions(tokens, self.placeholders, grids, self.processor.image_processor.merge_size, steps)

    def _grids(self, features: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the grids of images and then videos, and the seconds per step of each (`PromptImages`)."""
        grids = features["image_grid_thw"].numpy() if "image_grid_thw" in features else None
        if "video_grid_thw" not in features:
            return grids, None
        of_videos = features["video_grid_thw"].numpy()
        # The engines and the trainer compute positions from the same rounded number.
        given = features.get("second_per_grid_ts", np.ones(len(of_videos)))
        seconds: np.ndarray = np.asarray(given, dtype=np.float32).astype(np.float64)
        if self._family.video_times:  # each step is an image
            of_videos = of_videos.repeat(of_videos[:, 0], axis=0)
            of_videos[:, 0] = 1
            seconds = np.zeros(len(of_videos))
        if grids is None:
            return of_videos, seconds
        return np.concatenate([grids, of_videos]), np.concatenate([np.zeros(len(grids)), seconds])

    def _check_times(self, features: Any, videos: Sequence[Video]) -> None:
        """Raise DataError if the processor writes other texts between the steps of videos than `_video_text`."""
        if not videos or not self._family.video_times:
            return
        expected = self.expand(self._video_slot * len(videos), [video.size for video in videos])
        if features["input_ids"][0].tolist()[-len(expected) :] != expected:
            raise DataError(
                f"the processor of {self.path!r} writes times between the frames of a video in a form that is not "
                "supported."
            )
