"""Prompts for a judge: the user's template or a built-in one, filled in with a row and a response."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.common.errors import ConfigError, RewardError
from rltrain.config.schema.judge import BY_RULE, JudgeConfig

NAMES = ("question", "answer", "ground_truth", "data_source", "extra_info")
_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}


@dataclass(frozen=True)
class Question:
    """The inputs of a judge from a row, except its ground truth."""

    text: str
    images: tuple[bytes, ...] = ()
    """Contents of the image files."""


QuestionMaker = Callable[[], Question]
"""Function that creates the question on demand, because its images are read from files."""


class Template:
    """The prompt template of ``reward.judge.prompt``. Raises ConfigError if its file cannot be read or filled in."""

    def __init__(self, judge: JudgeConfig) -> None:
        from jinja2 import Environment, StrictUndefined, TemplateError, meta

        # In both, the instruction follows the response, because a response that contains instructions must not be last.
        own = Path(__file__).with_name("extraction.txt" if judge.parse == BY_RULE else "verdict.txt")
        self._key = f"reward.judge.prompt={judge.prompt}"
        try:
            text = (Path(judge.prompt).expanduser() if judge.prompt is not None else own).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._key}: cannot be read as UTF-8 text: {error}.") from None
        environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
        try:
            names = meta.find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ConfigError(f"{self._key}: {error}. It must be a Jinja template.") from None
        if unknown := sorted(names - set(NAMES)):
            raise ConfigError(f"{self._key}: {{{{ {unknown[0]} }}}} is unknown; the names are {', '.join(NAMES)}.")
        if "answer" not in names:
            raise ConfigError(f"{self._key}: it does not contain the response. Write {{{{ answer }}}} into it.")

    def filled(self, question: str, answer: str, truth: Any, source: str, extra_info: dict[str, Any]) -> str:
        """Return the text of a prompt. Raises RewardError if the template cannot be filled in with this row."""
        shown = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)
        values = dict(zip(NAMES, (question, answer, shown, source, extra_info), strict=True))
        try:
            return self._template.render(values)
        except Exception as error:  # noqa: BLE001 - a template of the user's may call anything
            raise RewardError(f"{self._key}: {type(error).__name__}: {error} (data_source={source!r}).") from None


def messages_of(text: str, images: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the messages of a request: one user message, images first."""
    if not images:
        return [{"role": "user", "content": text}]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": _address(file)}} for file in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def _address(file: bytes) -> str:
    kind = next((kind for begin, kind in _KINDS.items() if file.startswith(begin)), "octet-stream")
    return f"data:image/{kind};base64,{base64.b64encode(file).decode('ascii')}"
