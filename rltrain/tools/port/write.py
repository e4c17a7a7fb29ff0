"""Output of the ported script: one array of settings for each launch, with a comment above each decision."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rltrain.common.errors import sanitize
from rltrain.common.secrets import masked, masked_text
from rltrain.config.schema.keys import all_keys, free_form_parent
from rltrain.tools.port.launches import Launch
from rltrain.tools.port.shell import restored
from rltrain.tools.port.translate import Ported

# Variables of verl's scripts that rltrain sets itself if needed, or does not use.
_OURS = re.compile(r"VLLM_(USE_V1|ATTENTION_BACKEND|ALLREDUCE\w*)|HYDRA_\w+|RAY_\w+|VERL_\w+")
# Variables that have an effect here, but not the effect that the script intends.
_NOT_HERE = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "left out: Megatron needs it, but under FSDP2 it hinders the overlap of "
    "communication and computation"
}

_PLAIN = re.compile(r"[A-Za-z0-9_.@/+-]+")


def script(
    source: str, launches: Sequence[tuple[Launch, Ported]], placeholders: Mapping[str, str], said: Sequence[str]
) -> str:
    """Return the text of a shell script that starts the launches one after the other."""
    lines = ["#!/usr/bin/env bash", f"# {flat(source)}, for rltrain. What differs from rltrain's defaults, and why."]
    lines += [f"#   {flat(line)}" for line in said]
    lines += ["set -euo pipefail", ""]
    body = [line for launch, ported in launches for line in _launch(launch, ported, placeholders)]
    text = "\n".join(body)
    lines += [f': "${{{name}:?the script expects it}}"' for name in placeholders if f"${{{name}}}" in text]
    # Quoted values contain no control characters. This removes them from the rest of the line.
    return sanitize("\n".join(lines) + "\n" + text + "\n")


def _launch(launch: Launch, ported: Ported, placeholders: Mapping[str, str]) -> list[str]:
    lines = [f"# Was: {flat(launch.entry)}"]
    for title, notes in (
        ("Not carried over", ported.lost),
        ("Left to do", ported.to_do),
        ("Decided", ported.decisions),
        ("Left out, it changes nothing here", ported.without_effect),
    ):
        if notes:
            lines += [f"# {title}:", *(f"#   {flat(note, placeholders)}" for note in dict.fromkeys(notes))]
    for name, value in launch.exported:
        if holds_secret(name, value, placeholders):
            lines.append(f"# export {name}=…  (a secret: not copied)")
        elif why := _NOT_HERE.get(name):
            lines.append(f"# export {name}={_quoted(value, placeholders)}  ({why})")
        elif not _OURS.fullmatch(name):
            lines.append(f"export {name}={_quoted(value, placeholders)}")
    lines.append("ARGS=(")
    order = {key: number for number, key in enumerate(all_keys())}
    for key in sorted(ported.settings, key=lambda key: order.get(free_form_parent(key) or key, len(order))):
        lines += [f"    # {flat(why, placeholders)}" for why in ported.comments.get(key, [])]
        # A key from a file may contain anything, so it is quoted with its value unless it is a plain name.
        name = f"{key}=" if _PLAIN.fullmatch(key) else ""
        if name and holds_secret(key, ported.settings[key], placeholders):
            variable = re.sub(r"\W", "_", key.rpartition(".")[2]).upper()
            lines += ["    # a secret: not copied; set the variable", f"    {name}'${{oc.env:{variable}}}'"]
            continue
        lines.append(f"    {name}{_quoted(('' if name else f'{key}=') + ported.settings[key], placeholders)}")
    return [*lines, ")", 'python -m rltrain.main_ppo "${ARGS[@]}" "$@"', ""]


def holds_secret(name: str, value: str, placeholders: Mapping[str, str]) -> bool:
    """Return True if a value is a secret in plain text, and not a variable of the user."""
    literal = re.sub(r"\$\{\w+\}", "", restored(value, placeholders))
    return "${oc.env:" not in value and bool(literal) and masked(literal, name.lstrip("+")) != literal


def flat(note: str, placeholders: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a note as one line without secrets, because text after a line break in a comment would be executed."""
    line = "".join(letter for letter in " ".join(note.split()) if letter.isprintable())
    return masked_text(restored(line, placeholders))


def _quoted(value: str, placeholders: Mapping[str, str]) -> str:
    """Quote for the shell: in double quotes if the value contains a variable of the user, else literally."""
    text = re.sub(r'(["\\$`])', r"\\\1", value)
    with_variables = restored(text, placeholders)
    if sanitize(value) != value and with_variables == text:
        escaped = re.sub(r"[\\']", r"\\\g<0>", value)
        letters = (letter if sanitize(letter) == letter else f"\\U{ord(letter):08x}" for letter in escaped)
        return f"$'{''.join(letters)}'"
    return f'"{with_variables}"' if with_variables != text else shlex.quote(value)
