"""Export of a sharded policy to a Hugging Face folder that transformers and vLLM load, and a check of the result.

A folder that loads may still be served differently than it was trained: with a different chat template, end tokens, or
image size. Therefore the small files are copied from the source, and the finished folder is loaded and compared with
the training, if its small files differ from the previous export. Only shapes of weights are compared, not values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from rltrain.common.device import host_memory
from rltrain.config.schema.families import family
from rltrain.data.chat import ChatEncoder
from rltrain.data.images import SLOT
from rltrain.models.files.folder import COPIED_SUFFIXES, copy_small_files, write_shards
from rltrain.models.files.hashed import Digests, alone
from rltrain.models.forward import PolicyModel
from rltrain.models.load import empty_model, load_config, source_dtype
from rltrain.models.vision import takes_images
from rltrain.models.weights.names import CheckpointNames, gathered_weights

_TEMPLATE = "chat_template.jinja"
_GENERATION = "generation_config.json"
_PROCESSOR, _PROCESSORS = "preprocessor_config.json", "processor_config.json"  # the second: since transformers 5
_OLDER_BOUNDS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
# Test image for both processors. Its size fits no family's tile ratio.
_PROBE = (640, 480)
Shapes = dict[str, tuple[int, ...]]


class Export:
    """Export of a policy to a Hugging Face folder: created on all ranks, gathered repeatedly, and written by rank 0.

    encoder: the encoder of the training prompts. The small files of its model (a folder or a hub name) are copied byte
    for byte. A custom chat template and custom pixel bounds overwrite the model's.
    """

    def __init__(self, policy: PolicyModel, config: PretrainedConfig, encoder: ChatEncoder) -> None:
        self._policy, self._config, self._encoder = policy, config, encoder
        self._dtype = source_dtype(config, encoder.path)
        self._weights: dict[str, torch.Tensor] = {}
        self._hosts: dict[str, torch.Tensor] = {}
        self._fine: list[Any] = []  # files that had no problems in the last check
        if dist.get_rank() == 0:
            # Every family supports eager attention, and families with attention sinks support only this. Created here,
            # because transformers has global state that the writing thread would share.
            self._model = empty_model(config, "eager", self._dtype, trust_remote_code=encoder.trust_remote_code)

    @property
    def num_bytes(self) -> int:
        """Approximate bytes that `gather` needs on the host of this rank, beyond the memory that it keeps."""
        return 0 if self._hosts or dist.get_rank() else self._model.num_parameters() * self._dtype.itemsize

    def gather(self, copies: bool = False) -> None:
        """Gather the weights on rank 0, in the source checkpoint's dtype (a collective). Buffers keep their dtype,
        because routers' correction biases are float32 in half-precision checkpoints.

        copies: also copy weights that are already on the host, so that they may change before `write` ends. The memory
        is kept for later copies.
        """
        # All ranks iterate, because every weight is a collective; only rank 0 keeps the weights.
        for name, values, in_checkpoint in gathered_weights(self._policy, self._dtype):
            if in_checkpoint and dist.get_rank() == 0:
                self._weights[name] = self._copy(name, values) if copies else values.cpu()

    def _copy(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if not self._hosts:
            # As in `gathered_weights`, tied weights appear once, under their first name.
            whole = dict(self._model.named_parameters())
            memory = host_memory([tensor.to(self._dtype) for tensor in whole.values()], locked=not values.is_cpu)
            self._hosts = dict(zip(whole, memory, strict=True))
        host = self._hosts.get(name)
        return values.to("cpu", copy=True) if host is None else alone(host.copy_(values))

    def write(self, folder: Path, card: str, digests: Digests) -> list[str]:
        """Write the gathered weights, on rank 0. card: text of README.md after its metadata.

        Returns the problems from `find_problems`. Raises DiskError.
        """
        encoder, sees, gathered_weights, self._weights = self._encoder, self._policy.sees, self._weights, {}
        weights = {name: gathered_weights[name] for name in self._model.state_dict() if name in gathered_weights}
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        _write(self._model, weights, encoder, source_folder(encoder.path, self._config), folder, digests)
        if sees and (encoder.min_pixels or encoder.max_pixels):
            _write_bounds(encoder, family(self._config.model_type).frames_per_image, folder)
        if card:
            task = "image-text-to-text" if takes_images(self._config) else "text-generation"
            head = f"---\nlibrary_name: transformers\npipeline_tag: {task}\n"
            (folder / "README.md").write_text(head + card, encoding="utf-8")
        # The check is skipped if nothing has changed, because loading a large tokenizer holds the GIL for a second.
        files = sorted(file for file in folder.iterdir() if file.suffix in COPIED_SUFFIXES)
        looked_at = [shapes, *((file.name, xxhash.xxh3_128(file.read_bytes()).digest()) for file in files)]
        problems = [] if looked_at == self._fine else find_problems(folder, encoder, shapes, sees=sees)
        self._fine = [] if problems else looked_at
        return problems


def _write(
    model: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    encoder: ChatEncoder,
    source: Path,
    folder: Path,
    digests: Digests,
) -> None:
    if not (source / _GENERATION).is_file() and model.generation_config is not None:
        # The model's config may name an end token other than the one used in training.
        model.generation_config.eos_token_id = encoder.eos_token_ids
    disable_progress_bar()  # the progress bar is invisible here, and its thread hangs forever when memory runs out
    model.save_pretrained(folder, state_dict={})  # writes everything except the weights
    write_shards(CheckpointNames(model)(weights), folder, digests)
    copy_small_files(source, folder)
    if encoder.chat_template is not None:
        _write_template(encoder.tokenizer.chat_template, folder)


def source_folder(path: str, config: PretrainedConfig) -> Path:
    """Return the folder with the small files of a model. For a hub name, they are fetched in the loaded revision."""
    if Path(path).is_dir():
        return Path(path)
    patterns = [f"*{suffix}" for suffix in COPIED_SUFFIXES]
    revision = getattr(config, "_commit_hash", None)
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception:  # noqa: BLE001 - a network failure must not end a run: the loaded files are in the cache
        return Path(str(cached_file(path, "config.json", revision=revision, local_files_only=True))).parent


def _write_template(text: str, folder: Path) -> None:
    """Write the template to every file that a server may read it from."""
    (folder / _TEMPLATE).write_text(text, encoding="utf-8")
    for name in ("tokenizer_config.json", _PROCESSORS, "chat_template.json"):
        with _changed(folder / name) as content:
            if "chat_template" in content:
                content["chat_template"] = text


def _write_bounds(encoder: ChatEncoder, frames: int, folder: Path) -> None:
    """Write the pixel bounds of training into the processor config, within the processor's own bounds.

    frames: see `Family.frames_per_image`. A tile processor has no bounds. `find_problems` reports it if the number of
    image tokens then differs.
    """
    size = encoder.processor.image_processor.size
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    if not least or not most:
        return
    bounds = {
        "shortest_edge": min(max(least, frames * (encoder.min_pixels or 0)), most),
        "longest_edge": max(min(most, frames * encoder.max_pixels if encoder.max_pixels else most), least),
    }
    for name in (_PROCESSOR, _PROCESSORS):
        with _changed(folder / name) as content:
            part = content.get("image_processor", {}) if name == _PROCESSORS else content
            if part:
                part["size"] = bounds
                # Older files use these names, and they take precedence there.
                part |= {key: bounds[edge] for key, edge in _OLDER_BOUNDS.items() if key in part}


@contextmanager
def _changed(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of a JSON file, {} if it is missing, and write it back if it was changed."""
    before = file.read_text("utf-8") if file.is_file() else "{}"
    content = json.loads(before)
    yield content
    if content != json.loads(before):
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# -- check of the export -----------------------------------------------------------------------------------------------


def find_problems(folder: Path, encoder: ChatEncoder, shapes: Shapes, *, sees: bool = False) -> list[str]:
    """Load an exported folder (except the values of its weights), compare it with the training, and return the problems
    by file.

    encoder: the encoder of the training prompts. shapes: shapes of the exported weights. sees: whether prompts had
    images.
    """
    exported = ChatEncoder(str(folder), encoder.trust_remote_code, template_kwargs=encoder.template_kwargs)
    # Each file is checked separately, so that a file that does not load does not hide problems in others.
    looks: dict[str, Callable[[], Iterable[str]]] = {
        "config.json": lambda: load_config(str(folder), trust_remote_code=encoder.trust_remote_code) and (),
        "tokenizer_config.json": lambda: _check_tokenizer(exported, encoder),
        _GENERATION: lambda: _check_ends(exported, encoder),
        "model.safetensors": lambda: _check_weights(folder, shapes),
    }
    if sees:
        looks[_PROCESSOR] = lambda: _check_images(exported, encoder)
    problems: list[str] = []
    for name, look in looks.items():
        try:
            problems += look()
        except Exception as error:  # noqa: BLE001 - no error of a library may cost the checkpoint
            problems.append(f"{name} does not load: {error}")
    return problems


def _check_tokenizer(exported: ChatEncoder, encoder: ChatEncoder) -> Iterator[str]:
    if exported.vocab_size != encoder.vocab_size:
        yield f"tokenizer.json has {exported.vocab_size} tokens instead of {encoder.vocab_size}"
    if exported.tokenizer.chat_template != encoder.tokenizer.chat_template:
        yield f"{_TEMPLATE} is not the template of the training prompts"


def _check_ends(served: ChatEncoder, encoder: ChatEncoder) -> Iterator[str]:
    if served.eos_token_ids != encoder.eos_token_ids:
        yield f"{_GENERATION} ends responses at tokens {served.eos_token_ids}, in training at {encoder.eos_token_ids}"


def _check_images(exported: ChatEncoder, encoder: ChatEncoder) -> Iterator[str]:
    from PIL import Image

    conversation, image = [{"role": "user", "content": SLOT}], Image.new("RGB", _PROBE)
    exported_prompt, expected = (
        chat_encoder.encode_prompt(conversation, [image]) for chat_encoder in (exported, encoder)
    )
    if exported_prompt.tokens.tolist() != expected.tokens.tolist():
        yield (
            f"{_PROCESSOR} makes {len(exported_prompt.tokens)} tokens of an image of {' x '.join(map(str, _PROBE))}; "
            f"in training it was {len(expected.tokens)}. Scale images to data.min_pixels and data.max_pixels before "
            "you send them."
        )


def _check_weights(folder: Path, shapes: Shapes) -> Iterator[str]:
    stored_shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            names = weights.keys()
            stored_shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in names}
    # transformers may write weights under older names and split them differently. In that case only the total number of
    # elements must match.
    if stored_shapes != shapes and sum(map(prod, stored_shapes.values())) != sum(map(prod, shapes.values())):
        wrong = next(name for name in sorted(stored_shapes | shapes) if stored_shapes.get(name) != shapes.get(name))
        yield f"model.safetensors: {wrong} has shape {stored_shapes.get(wrong)} instead of {shapes.get(wrong)}"
