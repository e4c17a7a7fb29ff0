"""The words of ``rltrain serve``."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.config.schema.fields import key

_SWITCHES = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class ServeSettings:
    """What can be set of a server."""

    model: str = ""
    """A model folder, RUN (its newest checkpoint), RUN/global_step_N, or a name on the hub."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all of this machine."""
    port: int = key(8000, least=0, most=65535)
    """Port to listen on; 0: a free one."""
    served_model_name: str | None = None
    """The model's name in requests; null: model as it was typed."""
    max_model_len: int | None = key(None, least=2)
    """Most tokens of prompt and answer together; null: as many as the model has positions."""
    dtype: str = key("auto", among=("auto", "float32", "bfloat16", "float16"))
    """Of the weights and the computation; auto: that of the checkpoint."""
    chat_template: str | None = None
    """Jinja template, or a file with one, in the place of the model's own."""
    min_pixels: int | None = key(None, least=1)
    """Images are scaled up to as many pixels; null: as the model's processor says."""
    max_pixels: int | None = key(None, least=1)
    """Images are scaled down to as many pixels; null: as the model's processor says."""
    trust_remote_code: bool = False
    """Run code that the model's folder brings along."""
    max_num_seqs: int = key(256, least=1)
    """Most answers that are generated at once."""
    gpu_memory_utilization: float = key(0.8, over=0, most=1)
    """Share of the device's memory; with --engine hf of what is free, for keys and values."""
    device: str = key("auto", among=("auto", "cpu", "cuda", "npu"))
    """Where --engine hf computes; vLLM takes what it was built for."""

    @property
    def name(self) -> str:
        """The model's name in requests."""
        return self.served_model_name or self.model


def read_settings(words: Sequence[str]) -> ServeSettings:
    """``KEY=VALUE`` each. Raises ConfigError with all that is wrong with them."""
    known = {entry.name: entry for entry in fields(ServeSettings)}
    kinds = typing.get_type_hints(ServeSettings)
    wrong, given = list[str](), dict[str, Any]()
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}=?" if near else f"Keys: {', '.join(known)}."
            wrong.append(f"{word}: {f'unknown key {name}' if equals else 'this is no KEY=VALUE'}. {hint}")
            continue
        try:
            value = given[name] = _value(text, kinds[name])
        except ValueError as error:
            wrong.append(f"{word}: {error}.")
            continue
        rules = known[name].metadata.get("rules")
        if rules and rules.among and value not in rules.among:
            wrong.append(f"{word}: use one of {', '.join(rules.among)}.")
        elif rules and isinstance(value, int | float) and not rules.within(value):
            wrong.append(f"{word}: it must be {rules.bounds()}.")
    if not given.get("model"):
        wrong.append("model= is not given: a model folder, a run, RUN/global_step_N, or a name on the hub.")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return ServeSettings(**given)


def _value(text: str, kind: Any) -> Any:
    """Raises ValueError with what was expected."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if types.NoneType in kinds and text.lower() in ("", "null", "none"):
        return None
    if bool in kinds:
        if text.lower() not in _SWITCHES:
            raise ValueError("expected true or false")
        return _SWITCHES[text.lower()]
    for number, told in ((int, "a whole number"), (float, "a number")):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                raise ValueError(f"expected {told}") from None
    return text
