"""``rltrain port SCRIPT.sh|CONFIG.yaml [-o NEW.sh]``: Convert a verl run to a short rltrain script.

Nothing is trained. The launch script is expanded by a shell with text tools only, in a jail. Exit code 0: a run would
accept the new script; 2: the new script needs changes, or settings were not carried over.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from rltrain.common.errors import ConfigError, command
from rltrain.common.logs import count
from rltrain.common.secrets import MASK
from rltrain.config.verl.defaults import chosen_settings
from rltrain.config.verl.hydra import compose
from rltrain.tools.port.launches import Launch, launches
from rltrain.tools.port.shell import Call, Recording, record
from rltrain.tools.port.translate import ASKED, translate, typed
from rltrain.tools.port.write import flat, holds_secret, script


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
