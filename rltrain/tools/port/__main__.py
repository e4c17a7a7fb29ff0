"""``rltrain port SCRIPT.sh|CONFIG.yaml [-o NEW.sh]``: Convert a verl run to a short rltrain script.

Nothing is trained. The launch script is expanded by a shell with text tools only, in a jail. Exit code 0: a run would
accept the new script; 2: the new script needs changes, or settings were not carried over.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rltrain.common.errors import ConfigError, command, sanitize
from rltrain.common.logs import count
from rltrain.common.secrets import MASK, masked, masked_text
from rltrain.config.schema.keys import all_keys, free_form_parent
from rltrain.config.verl.defaults import chosen_settings
from rltrain.config.verl.hydra import compose
from rltrain.tools.port.launches import Launch, launches
from rltrain.tools.port.shell import Call, Recording, record, restored
from rltrain.tools.port.translate import ASKED, Ported, translate, typed


@command
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    # The arguments after --overrides are verl's and may look like flags.
    own_words, overrides = (words, None) if "--overrides" not in words else _split(words)
    parser = argparse.ArgumentParser(
        prog="rltrain port", description=str(__doc__).partition(": ")[2], allow_abbrev=False
    )
    parser.add_argument("source", nargs="?", type=Path, help="a launch script, or a configuration (.yaml)")
    parser.add_argument("arguments", nargs="*", default=[], help="arguments of the script")
    parser.add_argument("-o", "--output", type=Path, help="the new script (default: printed)")
    parser.add_argument("--overrides", action="store_true", help="the next arguments are verl's key=value settings")
    arguments = parser.parse_intermixed_args(own_words)
    if overrides is not None:
        words = ["python3", "-m", "verl.trainer.main_ppo", *overrides]
        recording = Recording((Call(tuple(words), {}),))
        return _port("a command of verl's", recording, [Path.cwd()], arguments.output)
    if arguments.source is None:
        parser.error("give a launch script or a configuration")
    source: Path = arguments.source
    if source.suffix in (".yaml", ".yml"):
        settings = {key: typed(value) for key, value in chosen_settings(compose(source), ASKED).items()}
        return _write(source.name, [Launch(source.name, tuple(settings.items()))], [], {}, arguments.output)
    recording = record(source, arguments.arguments)
    folders = [Path.cwd(), source.absolute().parent, *source.absolute().parents]
    return _port(source.name, recording, folders, arguments.output)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    at = words.index("--overrides")
    return words[:at], words[at + 1 :]


def _port(name: str, recording: Recording, folders: list[Path], output: Path | None) -> int:
    runs, notes = launches(recording.calls, folders)
    notes += [f"{name} was taken to be {value} where sizes follow from it" for name, value in recording.assumed.items()]
    if not recording.finished:
        notes.append("the script did not end in time (it may wait for something): its later commands are missing here")
    if not runs:
        note_lines = "".join(f"\n{line}" for line in notes)
        raise ConfigError(f"{name} does not start a recognizable verl run.{note_lines}")
    return _write(name, runs, notes, recording.placeholders, output)


def _write(name: str, runs: list[Launch], notes: list[str], placeholders: dict[str, str], output: Path | None) -> int:
    ported = [(launch, translate(launch.settings)) for launch in runs]
    for launch, result in ported:
        result.lost += launch.lost
        written = (*launch.settings, *launch.exported)
        hidden = [value for key, value in written if len(value) > 3 and holds_secret(key, value, placeholders)]
        for said in (result.lost, result.to_do, result.decisions, result.without_effect, *result.comments.values()):
            for secret in hidden:
                said[:] = [note.replace(secret, MASK) for note in said]
    text = script(name, ported, placeholders, notes)
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")
        os.chmod(output, 0o755)
    left = [line for _, result in ported for line in (*result.lost, *result.to_do)]
    for launch, result in ported:
        sys.stderr.write(
            f"{flat(launch.entry)}: {count(len(launch.settings), 'setting')} of verl's, {len(result.settings)} here; "
            f"{len(result.without_effect)} change nothing here, {len(result.lost)} not carried over\n"
        )
    for line in notes + left:
        sys.stderr.write(f"  {flat(line, placeholders)}\n")
    if output is not None:
        sys.stderr.write(f"next: bash {shlex.quote(str(output))} --dry-run\n")
    return 2 if left else 0


if __name__ == "__main__":
    sys.exit(main())


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
