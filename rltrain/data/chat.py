"""Conversations as token ids, in one place: chat template, images, prompt length, truncation, stop tokens.

Prompts, the reward model's conversations and the linter's counts must agree token by token, so all of them come from
`ChatEncoder`. Prompts are encoded once, before a run starts, into a `PromptStore`: flat arrays that every process reads
from shared memory without a tokenizer. `ChatEncoder.encode_prompt` knows images too, but a run does not carry them yet,
so a row that holds any is refused here by name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rltrain.config.schema import Config
from rltrain.data.images import (
    EncodedPrompt,
    PromptImages,
    bounded,
    family_of,
    mrope_positions,
    one_each,
    open_image,
    runs,
    with_parts,
)
from rltrain.data.rows import PromptRow, Rows, first_of
from rltrain.errors import DataError

# Enough for the tokenizer to work on in parallel, without the texts of all rows in memory at once.
_ENCODE_CHUNK_ROWS = 512

Message = dict[str, Any]


@dataclass(eq=False)
class ChatEncoder:
    """Conversations to token ids and back, by the tokenizer and chat template of a model folder (or hub name).

    The tokenizer is loaded on first use and left out of a pickle, so the object may be handed to any process.
    ``chat_template`` replaces the model's own: Jinja text, or the path of a file that holds it. ``template_kwargs`` are
    handed to the template (``enable_thinking`` and the like). ``min_pixels``, ``max_pixels``: images are scaled to lie
    between them, beside the bounds that the model's processor has.
    """

    path: str
    trust_remote_code: bool = False
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    min_pixels: int | None = None
    max_pixels: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ending where the assistant starts to answer."""
        return self.encode_batch([messages])[0]

    def encode_batch(self, conversations: Sequence[Sequence[Message]], *, answered: bool = False) -> list[list[int]]:
        """``encode`` of several conversations; much faster than one by one.

        ``answered``: a conversation ends with the assistant's message, and so do its ids.
        """
        for messages in conversations:
            _refuse_media(messages)
        return self._templated(conversations, tokenize=True, answered=answered)

    def _templated(self, conversations: Sequence[Sequence[Message]], *, tokenize: bool, answered: bool = False) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                [list(messages) for messages in conversations],
                tokenize=tokenize,
                add_generation_prompt=not answered,
                return_dict=False,  # transformers 5 returns a BatchEncoding by default
                **self.template_kwargs,
            )
        # Templates are programs: what they raise of themselves is the data's fault, anything else is ours and keeps its
        # traceback.
        except Exception as error:
            if not _is_template_error(error):
                raise
            raise DataError(f"the chat template of {self.path!r} refuses the conversation: {error}") from error

    def encode_prompt(self, messages: Sequence[Message], images: Sequence[Any] = ()) -> EncodedPrompt:
        """A conversation with its images, which stand where its texts have ``<image>``.

        images: as `open_image` takes them. Raises DataError for a family whose images cannot be trained on, for slots
        and images that do not fit, and for an image that cannot be read, which it counts from 1.
        """
        parts = with_parts(messages, len(images))
        if not images:
            tokens = np.asarray(self.encode_batch([parts])[0], dtype=np.int32)
            return EncodedPrompt(tokens, tokens)
        family = family_of(self._model_type)
        processor, pictures = self.processor, [self._picture(*each, len(images)) for each in enumerate(images, 1)]
        text = self._templated([parts], tokenize=False)[0]
        if text.count(processor.image_token) != len(images):
            raise DataError(
                f"the conversation has {text.count(processor.image_token)} times {processor.image_token} for "
                f"{len(images)} images: it stands in the text itself, or the chat template does not know images."
            )
        try:
            made = processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
        except ValueError as error:
            raise DataError(f"the processor of {self.path!r} refuses the images: {error}") from error
        tokens = made["input_ids"][0].numpy().astype(np.int32)
        placeholder, pixels = processor.image_token_id, made["pixel_values"].numpy()
        starts, num_tokens = runs(tokens, placeholder)
        if len(starts) != len(images):
            raise DataError("the chat template puts images side by side, without a token between them.")
        grids = made["image_grid_thw"].numpy() if "image_grid_thw" in made else None
        num_rows = num_tokens * len(pixels) // num_tokens.sum() if grids is None else grids.prod(1)
        merge = getattr(processor.image_processor, "merge_size", 1)
        positions = mrope_positions(tokens, placeholder, grids, merge) if family.mrope and grids is not None else None
        places = np.flatnonzero(tokens == placeholder)
        found = PromptImages(pixels, grids, num_rows, num_tokens, places, positions)
        return EncodedPrompt(tokens, one_each(tokens, placeholder), found)

    def _picture(self, number: int, image: Any, count: int) -> Any:
        """Image ``number`` of ``count``, opened and within the bounds."""
        of_processor = self.processor.image_processor
        unit = getattr(of_processor, "patch_size", 1) * getattr(of_processor, "merge_size", 1)
        try:
            return bounded(open_image(image), self.min_pixels, self.max_pixels, unit)
        except DataError as error:
            raise DataError(f"image {number} of {count}: {error}") from error

    @cached_property
    def processor(self) -> Any:
        """The transformers processor of texts with images."""
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise DataError(
                f"prompts have images, and no processor could be loaded from {self.path!r}: {error} It needs "
                "preprocessor_config.json (or processor_config.json) in the folder, and the packages pillow and "
                "torchvision."
            ) from error
        if not hasattr(processor, "image_processor"):
            raise DataError(f"prompts have images, and the model in {self.path!r} has no processor for them.")
        return processor

    @cached_property
    def _model_type(self) -> str:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code).model_type

    def decode_batch(self, answers: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """Texts of answers, special tokens left out."""
        lists = [ids.tolist() if isinstance(ids, np.ndarray) else list(ids) for ids in answers]
        return self.tokenizer.batch_decode(lists, skip_special_tokens=True)

    @cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, its chat template checked."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"no tokenizer could be loaded from actor_rollout_ref.model.path={self.path!r}: {error}"
            ) from error
        if self.chat_template is not None:
            tokenizer.chat_template = _template_text(self.chat_template)
        if not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer in {self.path!r} has no chat template, so prompts cannot be written as its model "
                "expects them. Use an instruction-tuned model, put a chat_template.jinja into the folder, or set "
                "actor_rollout_ref.model.custom_chat_template to a Jinja template or a file with one."
            )
        return tokenizer

    @property
    def ignores_generation_prompt(self) -> bool:
        """Whether the template writes the same with and without the opening of the assistant's answer."""
        messages: list[Message] = [{"role": "user", "content": "?"}]
        return self.encode(messages) == self.encode_batch([messages], answered=True)[0]

    @property
    def backend(self) -> Any:
        """The ``tokenizers.Tokenizer``, which turns ids into text without transformers; None where there is none."""
        return getattr(self.tokenizer, "backend_tokenizer", None)

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Every token that ends an answer: the tokenizer's and those of generation_config.json; ascending."""
        # The two often differ: a chat model ends its turn with a token that is not the tokenizer's eos.
        found = {self.tokenizer.eos_token_id, *_generation_eos(self.path)} - {None}
        if not found:
            raise DataError(f"neither the tokenizer nor generation_config.json in {self.path!r} names an eos token.")
        return sorted(found)

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the tokenizer, added ones included (a model's embedding may be larger)."""
        return len(self.tokenizer)


def chat_encoder(cfg: Config) -> ChatEncoder:
    """The encoder of the policy's model folder, with the chat template and arguments that the config gives."""
    model = cfg.actor_rollout_ref.model
    return ChatEncoder(
        model.path,
        trust_remote_code=model.trust_remote_code,
        chat_template=model.custom_chat_template,
        template_kwargs=dict(cfg.data.apply_chat_template_kwargs),
    )


@dataclass(frozen=True)
class PromptStore:
    """Token ids of prompts, one after another. NumPy only: readable without torch or a tokenizer.

    Prompt ``i`` is ``values[offsets[i]:offsets[i + 1]]`` (int32) and belongs to row ``row_index[i]`` of the rows it was
    made from; ``num_dropped`` rows were too long.
    """

    values: np.ndarray
    offsets: np.ndarray
    row_index: np.ndarray
    num_dropped: int

    def __len__(self) -> int:
        return len(self.row_index)

    def __repr__(self) -> str:
        return f"<PromptStore: {len(self)} prompts, {len(self.values)} tokens, {self.num_dropped} dropped>"

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per prompt, int64."""
        return np.diff(self.offsets)

    def prompt(self, i: int) -> np.ndarray:
        """Token ids of prompt ``i`` (int32, a view)."""
        if not 0 <= i < len(self):
            raise IndexError(f"prompt {i} of {len(self)}")
        return self.values[self.offsets[i] : self.offsets[i + 1]]


def encode_prompts(
    rows: Rows, encoder: ChatEncoder, max_prompt_length: int, filter_overlong: bool = False, truncation: str = "error"
) -> PromptStore:
    """Token ids of all rows no longer than ``max_prompt_length``.

    A longer prompt is dropped (``filter_overlong``) or else treated by ``truncation``: ``error`` raises, ``left`` keeps
    its last tokens, ``right`` its first, ``middle`` half of each. Go on with ``rows.select(store.row_index)``: prompt i
    of the store is then row i of the rows.
    """
    kept, row_index, overlong = [], [], []
    _ = encoder.tokenizer  # where there is none, no row is to blame
    for position, ids in enumerate(_encode_rows(rows, encoder)):
        if len(ids) > max_prompt_length:
            # Collected even where they are an error, so that one message names how many there are and the length that
            # would do.
            if filter_overlong or truncation == "error":
                overlong.append((position, len(ids)))
                continue
            ids = truncate(ids, max_prompt_length, truncation)
        row_index.append(position)
        # int32 holds every vocabulary and is half of what every process maps.
        kept.append(np.asarray(ids, dtype=np.int32))
    if overlong and not filter_overlong:
        raise DataError(_overlong_report(rows, overlong, max_prompt_length))
    if not kept:
        shortest = min(length for _, length in overlong)
        raise DataError(
            f"data.filter_overlong_prompts=True leaves no prompt: all {len(rows)} are longer than "
            f"data.max_prompt_length={max_prompt_length} tokens (the shortest has {shortest})."
        )
    return PromptStore(
        values=np.concatenate(kept),
        offsets=np.cumsum([0, *map(len, kept)], dtype=np.int64),
        row_index=np.asarray(row_index, dtype=np.int64),
        num_dropped=len(overlong),
    )


def truncate(ids: list[int], limit: int, how: str) -> list[int]:
    """At most ``limit`` of ``ids``: the last (``left``), the first (``right``) or half of each (``middle``)."""
    if len(ids) <= limit:
        return ids
    if how == "left":
        return ids[len(ids) - limit :]
    if how == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def _encode_rows(rows: Rows, encoder: ChatEncoder) -> Iterator[list[int]]:
    """Token ids row by row; templated in chunks, and again one by one where a chunk fails, to name the row."""
    for position in range(len(rows)):
        if rows.media(position):
            raise DataError(
                f"{rows.origin(position)} holds {' and '.join(rows.media(position))}: "
                "vision prompts are not in this version; use text rows."
            )
    stream: Iterator[PromptRow] = iter(rows)
    for start in range(0, len(rows), _ENCODE_CHUNK_ROWS):
        prompts = [row.prompt for row in islice(stream, _ENCODE_CHUNK_ROWS)]
        try:
            yield from encoder.encode_batch(prompts)
        except DataError:
            for position, prompt in enumerate(prompts, start):
                try:
                    encoder.encode(prompt)
                except DataError as error:
                    raise DataError(f"{rows.origin(position)}: {error}") from error
            raise


def _overlong_report(rows: Rows, overlong: list[tuple[int, int]], limit: int) -> str:
    longest = max(length for _, length in overlong)
    title = (
        f"{len(overlong)} of {len(rows)} prompts are longer than data.max_prompt_length={limit} tokens. Try "
        f"data.filter_overlong_prompts=True, data.max_prompt_length={longest}, or data.truncation=left."
    )
    return first_of(title, [f"{rows.origin(position)}: {length} tokens" for position, length in overlong])


def _refuse_media(messages: Sequence[Message]) -> None:
    for message in messages:
        content = message.get("content")
        kinds = {part.get("type") for part in content if isinstance(part, dict)} if isinstance(content, list) else set()
        if kinds - {"text"}:
            held = ", ".join(sorted(map(str, kinds - {"text"})))
            raise DataError(f"a message holds {held}: vision prompts are not in this version.")


def _is_template_error(error: Exception) -> bool:
    from jinja2.exceptions import TemplateError

    # A template that adds None to a text raises Python's own TypeError.
    return isinstance(error, (TemplateError, TypeError))


def _template_text(template: str) -> str:
    # Every Jinja template that writes a message has a brace, and hardly any path has.
    if "{" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"the chat template {template!r} is neither Jinja text nor a readable file: {error}") from error


def _generation_eos(path: str) -> set[int]:
    """Stop tokens that generation_config.json names; none where there is no such file."""
    from transformers import GenerationConfig

    is_folder = Path(path).is_dir()
    if is_folder and not (Path(path) / "generation_config.json").exists():
        return set()
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError as error:
        if is_folder:
            raise DataError(f"generation_config.json in {path!r} cannot be read ({error}).") from error
        return set()  # the repository on the hub has none
    return {eos} if isinstance(eos, int) else set(eos or ())
