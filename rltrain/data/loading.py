"""Loading of a model folder's files for conversations: tokenizer, chat template, image processor, stop tokens."""

from pathlib import Path
from typing import Any

from rltrain.common.errors import DataError, host_error


def load_tokenizer(path: str, trust_remote_code: bool, chat_template: str | None) -> Any:
    """Load the transformers tokenizer of a folder or hub name, with ``chat_template`` if it is given.

    Raises DataError if there is no tokenizer or no template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise host_error(error) or DataError(
            f"no tokenizer could be loaded from actor_rollout_ref.model.path={path!r}: {error}"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = template_text(chat_template)
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer in {path!r} has no chat template, so prompts cannot be formatted for the model. Use an "
            "instruction-tuned model, put a chat_template.jinja into the folder, or set "
            "actor_rollout_ref.model.custom_chat_template to a Jinja template or a file with one."
        )
    return tokenizer


def load_processor(path: str, trust_remote_code: bool) -> Any:
    """Load the transformers processor of texts with images. Raises DataError if there is none."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise host_error(error) or DataError(
            f"prompts have images, but no processor could be loaded from {path!r}: {error} It needs "
            "preprocessor_config.json (or processor_config.json) in the folder, and the packages pillow and "
            "torchvision."
        ) from error
    if not hasattr(processor, "image_processor"):
        raise DataError(f"prompts have images, but the model in {path!r} has no image processor.")
    return processor


def replaces_video_token(processor: Any) -> bool:
    """Return whether the tokens of a video replace its token only, or (before transformers 5.10) also those around."""
    from transformers import ProcessorMixin

    name = "replace_video_token"
    return getattr(type(processor), name, None) is not getattr(ProcessorMixin, name, None)


def load_config(path: str, trust_remote_code: bool) -> Any:
    """Load the configuration of the model, or return None."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None


def template_text(template: str) -> str:
    """Return Jinja text, given directly or as the path of a file."""
    # Jinja templates contain a brace, which paths hardly ever do.
    if "{" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise host_error(error) or DataError(
            f"the chat template {template!r} is neither Jinja text nor a readable file: {error}"
        ) from error


def generation_eos(path: str) -> set[int]:
    """Return the stop tokens of generation_config.json, or an empty set without such a file."""
    from transformers import GenerationConfig

    is_folder = Path(path).is_dir()
    if is_folder and not (Path(path) / "generation_config.json").exists():
        return set()
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError as error:
        if is_folder:
            raise DataError(f"generation_config.json in {path!r} cannot be read ({error}).") from error
        return set()  # the hub repository has none
    return {eos} if isinstance(eos, int) else set(eos or ())
