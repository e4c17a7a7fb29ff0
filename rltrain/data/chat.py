"""Conversations as token ids: chat template, images, prompt length, truncation, stop tokens.

Prompts, the reward model's conversations and the linter's counts must have the same tokens, so all of them use
`ChatEncoder`. The tokens of a prompt depend only on its texts and the sizes of its images (`expand`), which are in the
headers of the files. Pixels are computed on demand (`with_pixels`).
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rltrain.common.errors import DataError
from rltrain.config.schema import Config
from rltrain.data.images import (
    EncodedPrompt,
    Family,
    bounded,
    bounded_size,
    family_of,
    open_image,
    with_parts,
)
from rltrain.data.loading import generation_eos, load_config, load_processor, load_tokenizer
from rltrain.data.media.processing import MediaProcessor
from rltrain.data.media.videos import Clip, StoredVideo, VideoSettings, VideoSize, count_media, video_settings
from rltrain.data.row_tools import RowTools, row_tools
from rltrain.data.trial import CPU_S, memory_bound, problem_in_fork

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
        stored = [StoredVideo.read(video, Path()) for video in videos]
        media = self.open_images([*images, *(replace(video, size=video.measure()) for video in stored)])
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
        return self.media.unit**2

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
            return Clip.of(size, self.videos, self.media.unit)
        return bounded_size(size, self.min_pixels, self.max_pixels, self.media.unit)

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
            tokens = self.media.expand(text, sizes[place])
            num_rows, num_tokens = map(self.media.num_rows, sizes[place]), map(tokens.count, self.media.placeholders)
            encoded[place] = (tokens, sum(num_rows), sum(num_tokens))
        return [encoded[place] for place in range(len(parts))]

    def with_images(self, ids: Sequence[int], images: Sequence[Any]) -> EncodedPrompt:
        """Encode token ids that have one placeholder for each of the images (from `open_images`).

        Raises DataError if the numbers differ, or the processor rejects an image.
        """
        if not images:
            return EncodedPrompt(np.asarray(ids, dtype=np.int32))
        if (number := list(ids).count(self.processor.image_token_id)) != len(images):
            raise DataError(f"the chat template writes {number} of {len(images)} images between two turns.")
        tokens = self.media.expand_ids(ids, [self.media.num_rows(image.size) for image in images])
        return self.with_pixels(np.asarray(tokens, dtype=np.int32), images)

    def with_pixels(self, tokens: np.ndarray, images: Sequence[Any]) -> EncodedPrompt:
        """Compute pixels, grids and positions of a prompt (see `MediaProcessor.with_pixels`)."""
        return self.media.with_pixels(tokens, images) if images else EncodedPrompt(tokens)

    @cached_property
    def media(self) -> MediaProcessor:
        """Tokens and pixels of images and videos. Raises DataError as `check_images_supported`."""
        return MediaProcessor(self.path, self.processor, self.tokenizer, self._family, self._model)

    def _open_image(self, number: int, image: Any, count: int) -> Any:
        """Open image ``number`` of ``count`` and scale it to the bounds, or the frames of a video."""
        try:
            if isinstance(image, StoredVideo):
                return image.open(self.bounded_size(image.size))
            return bounded(open_image(image), self.min_pixels, self.max_pixels, self.media.unit)
        except DataError as error:
            kind = "video" if isinstance(image, StoredVideo) else "image"
            raise DataError(f"{kind} {number} of {count}: {error}") from error

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
