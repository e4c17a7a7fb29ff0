"""Conversations as token ids: chat template, images, prompt length, truncation, stop tokens.

Prompts, the reward model's conversations and the linter's counts must have the same tokens, so all of them use
`ChatEncoder`. The tokens of a prompt depend only on its texts and the sizes of its images (`expand`), which are in the
headers of the files. Pixels are computed on demand (`with_pixels`).
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rltrain.common.errors import DataError
from rltrain.config.schema import Config
from rltrain.data.images import (
    EncodedPrompt,
    Family,
    PromptImages,
    blank_image,
    bounded,
    bounded_size,
    family_of,
    mrope_positions,
    one_array,
    open_image,
    runs,
    with_parts,
)
from rltrain.data.loading import generation_eos, load_config, load_processor, load_tokenizer, replaces_video_token
from rltrain.data.row_tools import RowTools, row_tools
from rltrain.data.trial import CPU_S, memory_bound, problem_in_fork
from rltrain.data.videos import Clip, StoredVideo, Video, VideoSettings, VideoSize, count_media, video_settings

# Maximum characters of one conversation, more than any model can read.
_MOST_CHARS = 10_000_000

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]] | None


@dataclass(eq=False)
class ChatEncoder:
    """Encoder and decoder of conversations, with the tokenizer and chat template of a model folder (or hub name).

    The tokenizer is loaded on first use and not pickled, so the object can be sent to any process. ``chat_template``
    replaces the model's template: Jinja text, or the path of a file with it. ``template_kwargs`` are passed to the
    template (such as ``enable_thinking``). ``min_pixels``, ``max_pixels``: images are scaled to these bounds, in
    addition to the processor's own. ``videos``: which frames of videos are taken, and their bounds.
    """

    path: str
    trust_remote_code: bool = False
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    min_pixels: int | None = None
    max_pixels: int | None = None
    videos: VideoSettings = field(default_factory=VideoSettings)
    row_tools: RowTools = field(default_factory=RowTools)
    """Default tools of conversations."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of all tools of the run."""
        return self.row_tools.schemas

    def __getstate__(self) -> dict[str, Any]:
        return {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}

    def encode(self, messages: Sequence[Message], *, tools: Tools = None) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's response starts. tools: JSON schemas."""
        return self.encode_batch([messages], tools=tools)[0]

    def encode_batch(
        self, conversations: Sequence[Sequence[Message]], *, answered: bool = False, tools: Tools = None
    ) -> list[list[int]]:
        """Encode several conversations, much faster than one by one.

        ``answered``: the conversations end with the assistant's message, and so do the ids.
        """
        for messages in conversations:
            _refuse_media(messages)
        return self._templated(conversations, tokenize=True, answered=answered, tools=tools)

    def render(self, messages: Sequence[Message], *, answered: bool = False, tools: Tools = None) -> str:
        """Return the text that `encode` tokenizes."""
        return self._templated([messages], tokenize=False, answered=answered, tools=tools)[0]

    def _templated(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        tokenize: bool,
        answered: bool = False,
        tools: Tools = None,
    ) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                [list(messages) for messages in conversations],
                tools=list(self.tools if tools is None else tools) or None,
                tokenize=tokenize,
                add_generation_prompt=not answered,
                return_dict=False,  # transformers 5 returns a BatchEncoding by default
                **self.template_kwargs,
            )
        # A template is a program. Its own errors become DataErrors. Other errors are bugs and keep their traceback.
        except Exception as error:
            if not _is_template_error(error):
                raise
            raise DataError(f"the chat template of {self.path!r} rejects the conversation: {error}") from error

    def try_template(
        self, conversations: Sequence[Sequence[Message]], media: Sequence[tuple[int, int]] = (), cpu_s: int = CPU_S
    ) -> None:
        """Raise DataError if the chat template hangs or exhausts memory on these conversations.

        media: number of images and of videos of each conversation. The template runs in a fork of this process, so the
        driver calls it before it starts anything.
        """
        _ = self.tokenizer
        numbers = media or [(0, 0)] * len(conversations)

        def longest() -> int:
            pairs = zip(conversations, numbers, strict=True)
            filled = [with_parts(conversation, *of) if any(of) else conversation for conversation, of in pairs]
            return max(map(len, self._templated(filled, tokenize=False)), default=0)

        if problem := problem_in_fork(longest, _MOST_CHARS, cpu_s):
            whose = "in custom_chat_template" if self.chat_template else f"of {self.path!r}"
            raise DataError(
                f"the chat template {whose} {problem} on a conversation of the data. Set "
                "actor_rollout_ref.model.custom_chat_template to another template, or use a model that you trust."
            )
        # The template is compiled here, within the memory limit, because Jinja evaluates constant expressions when it
        # compiles. Jinja does not evaluate constants that exceed this limit. Later conversations use the compiled
        # template.
        with memory_bound(), suppress(DataError):
            self._templated(conversations[:1], tokenize=False)

    def encode_prompt(
        self, messages: Sequence[Message], images: Sequence[Any] = (), videos: Sequence[Any] = ()
    ) -> EncodedPrompt:
        """Encode a conversation with images and videos at the ``<image>`` and ``<video>`` slots of its texts.

        images: see `open_image`. videos: see `StoredVideo.read`. Raises DataError for a family whose images cannot be
        trained on, for a mismatch of slots and images, and for an unreadable image, named by its number from 1.
        """
        media = self.open_images([*images, *(StoredVideo.read(video, Path()).measured() for video in videos)])
        tokens = np.asarray(self.expand([messages], [[medium.size for medium in media]])[0][0], dtype=np.int32)
        return self.with_pixels(tokens, media)

    def check_images_supported(self, *, videos: bool = False) -> None:
        """Raise DataError, with the reason, if prompts with images, or with videos, cannot be used with the model."""
        _ = self._family
        _ = self.processor
        if videos:
            family_of(self._model.model_type, media="videos")

    @property
    def uses_pixel_bounds(self) -> bool:
        """True if pixel bounds change the number of tokens of an image."""
        return self._family.takes_max_pixels

    @property
    def pixels_per_token(self) -> int:
        """Pixels of an image per token."""
        return self._unit**2

    def open_images(self, images: Sequence[Any]) -> list[Any]:
        """Open images as RGB PIL images within the bounds, and measured `StoredVideo` objects as `Video`.

        Raises DataError that names the image by its number from 1.
        """
        if images:
            self.check_images_supported(videos=any(isinstance(image, StoredVideo) for image in images))
        return [self._open_image(*numbered_image, len(images)) for numbered_image in enumerate(images, 1)]

    def bounded_size(self, size: Any) -> Any:
        """Return the width and height of an image within the bounds, or the `Clip` of a `VideoSize`."""
        if isinstance(size, VideoSize):
            return Clip.of(size, self.videos, self._unit)
        return bounded_size(size, self.min_pixels, self.max_pixels, self._unit)

    def expand(
        self,
        conversations: Sequence[Sequence[Message]],
        sizes: Sequence[Sequence[Any]],
        tools: Tools = None,
    ) -> list[tuple[list[int], int, int]]:
        """Encode conversations, with a placeholder per image token. Returns ids, pixel rows and image tokens of each.

        sizes: `bounded_size` of the images and then the videos of each conversation. Pixels are not read. tools: see
        `encode`.
        """
        pairs = zip(conversations, sizes, strict=True)
        parts = [with_parts(conversation, *count_media(of)) for conversation, of in pairs]
        plain = [place for place, of in enumerate(sizes) if not of]
        ids = self.encode_batch([parts[place] for place in plain], tools=tools) if plain else []
        encoded = {place: (tokens, 0, 0) for place, tokens in zip(plain, ids, strict=True)}
        seeing = [place for place, of in enumerate(sizes) if of]
        texts = self._templated([parts[place] for place in seeing], tokenize=False, tools=tools) if seeing else []
        for place, text in zip(seeing, texts, strict=True):
            num_rows = [self.num_rows(size) for size in sizes[place]]
            tokens = self._expand(text, sizes[place])
            encoded[place] = (tokens, sum(num_rows), sum(map(tokens.count, self.placeholders)))
        return [encoded[place] for place in range(len(parts))]

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

    def _expand(self, text: str, sizes: Sequence[Any]) -> list[int]:
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
        return self._expand_ids(self.tokenizer("".join(pieces), add_special_tokens=False)["input_ids"], rows)

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

    def _expand_ids(self, ids: Sequence[int], num_rows: Sequence[int]) -> list[int]:
        before, behind, tokens_of_a_row = self._frame
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
            token_ids += [*before, *[token] * int(next(sizes) * tokens_of_a_row), *behind]
        return token_ids

    def with_images(self, ids: Sequence[int], images: Sequence[Any]) -> EncodedPrompt:
        """Encode token ids that have one placeholder for each of the images (from `open_images`).

        Raises DataError if the numbers differ, or the processor rejects an image.
        """
        if not images:
            return EncodedPrompt(np.asarray(ids, dtype=np.int32))
        if (number := list(ids).count(self.processor.image_token_id)) != len(images):
            raise DataError(f"the chat template writes {number} of {len(images)} images between two turns.")
        tokens = self._expand_ids(ids, [self.num_rows(image.size) for image in images])
        return self.with_pixels(np.asarray(tokens, dtype=np.int32), images)

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
        if not images:
            return EncodedPrompt(tokens)
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
        positions = None
        if self._family.mrope and grids is not None:
            merge, steps = processor.image_processor.merge_size, None
            if seconds is not None:
                per_second = getattr(self._model.vision_config, "tokens_per_second", None)
                steps = np.where(seconds > 0, seconds * per_second if per_second else 1.0, 1.0)
            positions = mrope_positions(tokens, placeholders, grids, merge, steps)
        places = np.flatnonzero(np.isin(tokens, placeholders))
        prompt_images = PromptImages(pixels, grids, num_rows, num_tokens, places, positions, seconds)
        return EncodedPrompt(tokens, prompt_images)

    def _grids(self, features: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the grids of images and then videos, and the seconds per step of each (`PromptImages`)."""
        grids = features["image_grid_thw"].numpy() if "image_grid_thw" in features else None
        if "video_grid_thw" not in features:
            return grids, None
        of_videos = features["video_grid_thw"].numpy()
        # The engines and the trainer compute positions from the same rounded number.
        seconds = np.float64(np.float32(features.get("second_per_grid_ts", np.ones(len(of_videos)))))
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
        expected = self._expand(self._video_slot * len(videos), [video.size for video in videos])
        if features["input_ids"][0].tolist()[-len(expected) :] != expected:
            raise DataError(
                f"the processor of {self.path!r} writes times between the frames of a video in a form that is not "
                "supported."
            )

    def _open_image(self, number: int, image: Any, count: int) -> Any:
        """Open image ``number`` of ``count`` and scale it to the bounds, or the frames of a video."""
        try:
            if isinstance(image, StoredVideo):
                return image.open(self.bounded_size(image.size))
            return bounded(open_image(image), self.min_pixels, self.max_pixels, self._unit)
        except DataError as error:
            kind = "video" if isinstance(image, StoredVideo) else "image"
            raise DataError(f"{kind} {number} of {count}: {error}") from error

    @cached_property
    def _unit(self) -> int:
        """Side length of an image token in pixels."""
        of_processor = self.processor.image_processor
        return int(getattr(of_processor, "patch_size", 1) * getattr(of_processor, "merge_size", 1))

    @cached_property
    def processor(self) -> Any:
        """Processor of transformers for texts with images."""
        return load_processor(self.path, self.trust_remote_code)

    @cached_property
    def _family(self) -> Family:
        if self._model is None:
            raise DataError(f"prompts have images, but config.json in {self.path!r} has no model type that reads them.")
        return family_of(self._model.model_type, self.has_tower)

    @property
    def has_tower(self) -> bool:
        """True if config.json has a vision tower."""
        return getattr(self._model, "vision_config", None) is not None

    @property
    def model_vocab_size(self) -> int | None:
        """Vocabulary size of the model from config.json, or None if it does not give one."""
        return None if self._model is None else getattr(self._model.get_text_config(), "vocab_size", None)

    @cached_property
    def _model(self) -> Any:
        """Configuration of the model, or None."""
        return load_config(self.path, self.trust_remote_code)

    def decode_batch(self, answers: Sequence[Sequence[int] | np.ndarray], *, special: bool = False) -> list[str]:
        """Decode responses, without special tokens unless ``special``."""
        lists = [ids.tolist() if isinstance(ids, np.ndarray) else list(ids) for ids in answers]
        return self.tokenizer.batch_decode(lists, skip_special_tokens=not special)

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of transformers, with a validated chat template."""
        return load_tokenizer(self.path, self.trust_remote_code, self.chat_template)

    @property
    def ignores_generation_prompt(self) -> bool:
        """True if the template's output is the same with and without the generation prompt."""
        messages: list[Message] = [{"role": "user", "content": "?"}]
        return self.encode(messages) == self.encode_batch([messages], answered=True)[0]

    @property
    def backend(self) -> Any:
        """``tokenizers.Tokenizer``, which decodes without transformers, or None for a slow tokenizer."""
        return getattr(self.tokenizer, "backend_tokenizer", None)

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a response, ascending: from the tokenizer and generation_config.json."""
        # The two often differ: many chat models end turns with a token other than the tokenizer's eos.
        eos_ids = {self.tokenizer.eos_token_id, *generation_eos(self.path)} - {None}
        if not eos_ids:
            raise DataError(f"neither the tokenizer nor generation_config.json in {self.path!r} names an eos token.")
        return sorted(eos_ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the tokenizer, including added ones (a model's embedding may be larger)."""
        return len(self.tokenizer)


def chat_encoder(cfg: Config) -> ChatEncoder:
    """Return the encoder of the policy's model folder, with the configured chat template and arguments."""
    model = cfg.actor_rollout_ref.model
    return ChatEncoder(
        model.path,
        trust_remote_code=model.trust_remote_code,
        chat_template=model.custom_chat_template,
        template_kwargs=dict(cfg.data.apply_chat_template_kwargs),
        min_pixels=cfg.data.min_pixels,
        max_pixels=cfg.data.max_pixels,
        videos=video_settings(cfg.data),
        row_tools=row_tools(cfg.actor_rollout_ref.rollout),
    )


def _refuse_media(messages: Sequence[Message]) -> None:
    for message in messages:
        content = message.get("content")
        kinds = {part.get("type") for part in content if isinstance(part, dict)} if isinstance(content, list) else set()
        if kinds - {"text"}:
            media = ", ".join(sorted(map(str, kinds - {"text"})))
            if kinds <= {"text", "image"}:
                raise DataError("a message has an image, but the row has none. Does data.image_key name its column?")
            raise DataError(f"a message has {media}; supported are text, and images and videos that the row has.")


def _is_template_error(error: Exception) -> bool:
    from jinja2.exceptions import TemplateError

    # A template may raise Python's own errors, such as TypeError (None added to a text) or ArithmeticError (division by
    # 0). MemoryError is not included, because `try_template` reports it.
    of_python = (TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
    return isinstance(error, (TemplateError, *of_python))
