"""What a request of OpenAI's form asks for. Whatever would change an answer is read, or refused with 400: nothing is
left out in silence."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rltrain.base.http import Refused
from rltrain.workers.rollout.contract import Sampling

MOST_CHOICES = 128
_MOST_TOP = 20
_MOST_STOPS = 16
# As OpenAI's documentation has it for completions.
_USUAL_TOKENS = 16
# These change no answer.
_WITHOUT_EFFECT = {
    *("model", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
    *("store", "user", "parallel_tool_calls", "request_id", "priority"),
}
# What is not done here may be said where it asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}


@dataclass(frozen=True)
class Wanted:
    """A request, but for its prompts."""

    sampling: Sampling
    """`max_tokens` is -1 where the answer may be as long as there is room."""
    num_choices: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end an answer, and are no part of it."""
    stop_token_ids: frozenset[int] = frozenset()
    num_top: int | None = None
    """Likeliest tokens that are told beside each token; None: no log-probs at all."""
    echo: bool = False
    """The prompt is a part of the reply."""
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False

    def of_tokens(self, most: int) -> Wanted:
        """The same with at most so many tokens."""
        return replace(self, sampling=replace(self.sampling, max_tokens=most))


def parsed(body: bytes) -> dict[str, Any]:
    """The parameters of a request that are not null. Raises Refused."""
    try:
        given = json.loads(body)
        return {name: value for name, value in given.items() if value is not None}
    except (ValueError, AttributeError, RecursionError):
        raise Refused(400, "no_json", "the body is no JSON object.") from None


def read_chat(given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], Wanted]:
    """Messages, arguments for the chat template, and what is wanted. Raises Refused."""
    fields = _Fields(given)
    messages = fields.value("messages", list, [])
    if not messages:
        raise Refused(400, "invalid_value", "messages is the list of all messages, and none is here.")
    arguments = fields.value("chat_template_kwargs", dict, {})
    num_top = fields.number("top_logprobs", int, 0, 0, _MOST_TOP)
    has_log_probs = fields.value("logprobs", bool, False)
    longest = fields.number("max_completion_tokens", int, fields.number("max_tokens", int, -1, 1), 1)
    if num_top and not has_log_probs:
        raise Refused(400, "invalid_value", "top_logprobs needs logprobs=true.")
    return messages, arguments, _wanted(fields, longest, num_top if has_log_probs else None)


def read_completion(given: Mapping[str, Any]) -> tuple[list[str] | list[list[int]], Wanted]:
    """Prompts, as texts or as token ids, and what is wanted. Raises Refused."""
    fields = _Fields(given)
    prompt = fields.value("prompt", (str, list), "")
    prompts = [prompt] if isinstance(prompt, str) or (prompt and _is_number(prompt[0])) else prompt
    is_text = all(isinstance(each, str) for each in prompts)
    is_tokens = all(isinstance(each, list) and all(map(_is_number, each)) for each in prompts)
    if not all(prompts) or not prompts or not (is_text or is_tokens):
        text = "prompt is a text, a list of token ids, or a list of such; none of them is empty."
        raise Refused(400, "invalid_value", text)
    longest = fields.number("max_tokens", int, _USUAL_TOKENS, 0)
    num_top = fields.number("logprobs", int, -1, 0, _MOST_TOP)
    echo = fields.value("echo", bool, False)
    if not longest and not echo:
        raise Refused(400, "invalid_value", "max_tokens=0 asks for nothing but with echo=true.")
    if fields.number("best_of", int, 1, 1) > fields.number("n", int, 1, 1):
        raise Refused(400, "unsupported", "best_of above n is not done here. Leave it out.")
    return prompts, _wanted(fields, longest, None if num_top < 0 else num_top, echo)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wanted(fields: _Fields, longest: int, num_top: int | None, echo: bool = False) -> Wanted:
    temperature = fields.number("temperature", float, 1.0, 0, 100)
    stop = fields.value("stop", (str, list), [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > _MOST_STOPS or not all(isinstance(each, str) for each in stop):
        raise Refused(400, "invalid_value", f"stop is a text, or a list of at most {_MOST_STOPS} texts.")
    ends = fields.value("stop_token_ids", list, [])
    if not all(map(_is_number, ends)):
        raise Refused(400, "invalid_value", "stop_token_ids is a list of token ids.")
    options = fields.value("stream_options", dict, {})
    top_p = fields.number("top_p", float, 1.0, 0, 1)
    if top_p == 0:
        raise Refused(400, "invalid_value", "top_p=0 leaves no token: it is above 0, and at most 1.")
    wanted = Wanted(
        Sampling(
            longest,
            # Not divided by: greedy answers are those of temperature 0.
            temperature=temperature or 1.0,
            top_k=int(fields.number("top_k", int, -1, -1)),
            top_p=top_p,
            greedy=temperature == 0,
            ignore_eos=fields.value("ignore_eos", bool, False),
        ),
        num_choices=int(fields.number("n", int, 1, 1, MOST_CHOICES)),
        seed=fields.value("seed", int, None),
        stop=tuple(each for each in stop if each),
        stop_token_ids=frozenset(ends),
        num_top=num_top,
        echo=echo,
        skip_special_tokens=fields.value("skip_special_tokens", bool, True),
        stream=fields.value("stream", bool, False),
        include_usage=bool(options.get("include_usage")),
    )
    fields.refuse_others()
    return wanted


class _Fields:
    """The parameters of a request, of which each is asked for by somebody."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given, self._asked = given, set[str]()

    def value(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Raises Refused for a value of another type."""
        self._asked.add(name)
        value = self._given.get(name, default)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if name in self._given and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            told = " or ".join(_KINDS[each] for each in kinds)
            raise Refused(400, "invalid_value", f"{name}={json.dumps(value)[:100]}: it is {told}.")
        return value

    def number(self, name: str, kind: type, default: Any, least: float, most: float | None = None) -> Any:
        """Raises Refused for what is no number, or is out of bounds."""
        value = self.value(name, (int, float) if kind is float else int, default)
        if name in self._given and not (least <= value <= (value if most is None else most)):
            bounds = f"at least {least:g}" if most is None else f"between {least:g} and {most:g}"
            raise Refused(400, "invalid_value", f"{name}={value}: it is {bounds}.")
        return value

    def refuse_others(self) -> None:
        """Raises Refused for a parameter that nobody has asked for, unless it changes nothing."""
        for name, value in self._given.items():
            if name in self._asked or name in _WITHOUT_EFFECT or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                takes = "".join(f" or say {json.dumps(neutral)}" for neutral in _NEUTRAL[name])
                text = f"{name}={json.dumps(value)[:100]} is not done here: leave it out{takes}."
                raise Refused(400, "unsupported", text)
            raise Refused(400, "unknown_parameter", f"{name:.100} is no parameter of this request here. Leave it out.")


_KINDS: dict[type, str] = {
    bool: "true or false", dict: "an object", float: "a number", int: "a whole number", list: "a list", str: "a text",
}  # fmt: skip


def with_images(messages: list[Any]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The messages as chat templates take them, and their images. Raises Refused for what is no message.

    Texts without an image stay texts, as most templates take nothing else.
    """
    images: list[bytes] = []
    read: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(400, "invalid_value", f"{json.dumps(message)[:200]} is no message: it has role and content.")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        read.append({**message, "content": [_part(part, images) for part in parts]})
    if not images:
        read = [{**each, "content": "".join(part["text"] for part in each["content"])} for each in read]
    return read, images


def _part(part: Any, images: list[bytes]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        place = part.get("image_url")
        images.append(_image(place.get("url") if isinstance(place, dict) else place))
        return {"type": "image"}
    raise Refused(400, "invalid_value", f"{json.dumps(part)[:100]} is no part of a message: text and image_url are.")


def _image(url: Any) -> bytes:
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        text = "an image is a data URI here (data:image/png;base64,…): nothing is fetched from elsewhere."
        raise Refused(400, "invalid_value", text)
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error:
        raise Refused(400, "invalid_value", "the data of an image is no base64.") from None
