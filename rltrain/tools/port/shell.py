"""Expansion of a launch script: bash itself expands its variables, in a jail with stubs for all programs.

Only the shell's text tools are real there (`_TOOLS`). A variable that the script expects from the environment gets a
placeholder, which becomes the variable again in the new script.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltrain.common.errors import ConfigError
from rltrain.runtime.slots.jail import tasks_of_user
from rltrain.runtime.slots.program import run_in_jail
from rltrain.tools.port.jail import NO_JAIL

JAIL = Path(__file__).with_name("jail.py")
MOST_SECONDS = 10
_NUM_TASKS = 64  # processes that a script may have at once
_ROOT = 0
_NOBODY = 65534
_TOOLS = """
    bash awk sed grep egrep fgrep tr cut sort uniq head tail wc tee xargs cat echo printf seq basename dirname date
    expr bc jq paste rev tac env printenv nohup timeout nice test [ true false mktemp mkdir rm cp mv ls touch ln
    find readlink realpath comm nl fold shuf numfmt od pwd chmod
"""
# Programs that need a stub, because env, nohup or exec may start them and bash's hook does not see these calls. The
# hook records all other programs.
_STUBS = """
    python python2 python3 torchrun ray accelerate deepspeed uv pip pip3 conda hf mamba huggingface-cli modelscope
    wget curl git docker podman apptainer singularity kubectl srun sbatch ssh scp sudo mpirun tmux screen nsys
    numactl taskset stdbuf nvidia-smi npu-smi rocm-smi kill pkill killall sleep hdfs
"""
_HERE, _HOME, _RECORDS = "/__PWD__", "/__HOME__", "/records"
# Files of the script's folder that it may read: scripts that it sources, and configurations.
_BESIDE, _MOST_BYTES = (".sh", ".env", ".yaml", ".yml", ".json", ".txt"), 1 << 20

# Words and environment of a call, each in a separate file, because calls may run concurrently. A call such as `srun
# bash -c "python …"` or `sbatch <<EOF` contains another script, which is run here, too.
_RECORD = Path(__file__).with_name("record.sh").read_text(encoding="utf-8")
# A script must reach its launch even if files and folders that it expects are missing.
_PRELUDE = Path(__file__).with_name("prelude.sh").read_text(encoding="utf-8")
_SETTING = re.compile(r"\+*(actor_rollout_ref|data|trainer|algorithm)\.[\w.]+=")
_ANOTHER = "3"  # a number that is not assumed for any variable
_NO_EXIT = "exit() { true; }\n"


@dataclass(frozen=True)
class Call:
    """A recorded command: its words, and the variables that the script exported to it."""

    words: tuple[str, ...]
    exported: dict[str, str]


@dataclass(frozen=True)
class Recording:
    """The calls of a script."""

    calls: tuple[Call, ...]
    """In order."""
    placeholders: dict[str, str] = field(default_factory=dict)
    """Variables that the script expects, and their placeholders."""
    assumed: dict[str, str] = field(default_factory=dict)
    """Variables that sizes depend on, with the number that was assumed for them."""
    finished: bool = True
    """True if the script ended in time."""


def record(script: Path, arguments: Sequence[str] = (), most_seconds: float = MOST_SECONDS) -> Recording:
    """Run ``script`` in the jail. Raises ConfigError if it cannot be read or the machine does not support the jail."""
    try:
        text = script.read_text("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{script} cannot be read: {error.strerror}.") from error
    neighbours = _neighbours(script)
    others = "\n".join(content for name, content in neighbours.items() if name.endswith((".sh", ".env")))
    values = {name: _stand_in(name) for name in expected_variables(text, others)}

    def run(prelude: str, given: dict[str, str]) -> dict[str, Any]:
        return _jailed(script, text, arguments, given, {**neighbours, "/bin/prelude": prelude}, most_seconds)

    # If a script exits before its launch because something is missing, it is run again with exit disabled.
    for prelude in (_PRELUDE, _PRELUDE + _NO_EXIT):
        answer = run(prelude, values)
        if _launches(answer):
            break
    launches, assumed = _launches(answer), dict[str, str]()
    before = [list(words) for words in launches]
    for name, value in values.items():
        # Running the script with a different number shows which settings depend on it.
        if value.isdigit() and answer["finished"]:
            moved = _launches(run(prelude, values | {name: _ANOTHER}))
            assumed |= {name: value} if _trace(name, value, before, moved, launches) else {}
    stand_ins = {name: f"__{name}__" for name in values}
    calls = (Call(tuple(words), _exported(variables, values)) for words, variables in answer["calls"])
    return Recording(tuple(calls), stand_ins, assumed, answer["finished"])


def _launches(answer: dict[str, Any]) -> list[list[str]]:
    """Return the words of the calls that have settings, to be changed in place."""
    return [words for words, _ in answer["calls"] if any(map(_SETTING.match, words))]


def _trace(name: str, value: str, words: list[list[str]], moved: list[list[str]], traced: list[list[str]]) -> bool:
    """Replace a setting by the variable's placeholder if it equals the number assumed for it.

    Return True if anything else changed with the number.
    """
    changed = [len(call) for call in words] != [len(call) for call in moved]
    for call, moved_call, target in zip(words, moved, traced, strict=False):
        for at, (word, after) in enumerate(zip(call, moved_call, strict=False)):
            head = word.removesuffix(value)
            if word != after and head.endswith("=") and after == head + _ANOTHER:
                target[at] = f"{head}__{name}__"
            else:
                changed |= word != after
    return changed


def expected_variables(text: str, others: str = "") -> list[str]:
    """Return the variables that a script uses without a default and that neither it nor one of the ``others`` sets."""
    # "#" starts a comment only at the beginning of a word. Text in single quotes is searched too, because it is often
    # run later.
    text = re.sub(r"(?m)(^|\s)#.*$", "", text)
    used = re.findall(r"\$(?:\{#?)?([A-Za-z_]\w*)", text)
    text = f"{text}\n{others}"
    used += [name for sum_ in re.findall(r"\$?\(\((.*?)\)\)", text) for name in re.findall(r"[A-Za-z_]\w*", sum_)]
    # Uses with a default or a check: ${X:-1} ${X:+1} [ -z "$X" ] [[ -v X ]].
    optional = set(re.findall(r"\$\{([A-Za-z_]\w*):?[-=+]", text))
    optional |= set(re.findall(r"-[nvz]\s+\"?\$?\{?([A-Za-z_]\w*)", text))
    assigned = set(re.findall(r"(?<![\w$.{-])([A-Za-z_]\w*)(?:\[[^]\n]*\])?\+?=", text))
    assigned |= set(
        re.findall(r"\b(?:for|read(?:array)?(?:\s+-\w+)*|mapfile(?:\s+-\w+)*|select)\s+([A-Za-z_]\w*)", text)
    )
    shells = {"HOME", "PWD", "OLDPWD", "PATH", "RANDOM", "SECONDS", "LINENO", "UID", "EUID", "IFS", "HOSTNAME", "PPID"}
    excluded = optional | assigned | shells
    return [
        name for name in dict.fromkeys(used) if name not in excluded and not name.startswith(("BASH", "FUNCNAME", "_"))
    ]


def restored(text: str, placeholders: Mapping[str, str]) -> str:
    """Return ``text`` with variables instead of their placeholders, for the inside of double quotes."""
    names = {stand_in: name for name, stand_in in {"PWD": _HERE, "HOME": _HOME, **placeholders}.items()}
    # Names are replaced longest first and in one pass, because the name of one variable may contain the placeholder of
    # another.
    pattern = "|".join(re.escape(stand_in) for stand_in in sorted(names, key=len, reverse=True))
    return re.sub(pattern, lambda match: f"${{{names[match[0]]}}}", text)


def _stand_in(name: str) -> str:
    """Return a number if the name is a count, because sizes are computed with it; otherwise a searchable text."""
    if re.search(r"RANK|INDEX|PORT|_ID$|PROCID", name.upper()):
        return "0"
    if re.search(r"SIZE|NNODES|NODES|NUM|COUNT|GPUS|NPUS|NPROC|DEVICES_PER", name.upper()):
        return "1"
    return f"__{name}__"


def _exported(variables: list[str], placeholders: dict[str, str]) -> dict[str, str]:
    """Return the variables that the script itself exported."""
    of_shell = {"PATH", "HOME", "PWD", "OLDPWD", "SHLVL", "BASH_ENV", "LC_ALL", "TMPDIR", "_", "_AST_FEATURES"}
    split = (variable.partition("=") for variable in variables)
    return {
        name: value
        for name, _, value in split
        if re.fullmatch(r"[A-Za-z_]\w*", name) and name not in of_shell and name not in placeholders
    }


def _jailed(
    script: Path,
    text: str,
    arguments: Sequence[str],
    placeholders: dict[str, str],
    given: dict[str, str],
    most_seconds: float,
) -> dict[str, Any]:
    inside = f"{_HERE}/{script.name}"
    # Interpreters given by an absolute path get stubs too, because they may not exist on this machine.
    named = re.findall(r"(?<![\w.$}])((?:/[\w.+-]+)+/(?:python[\d.]*|torchrun|ray|uv|accelerate))\b", text)
    stubs = {
        *(f"/bin/{name}" for name in _STUBS.split()),
        *(name for name in named if not {".", ".."} & set(name.split("/"))),
        *(f"/bin/{python}" for python in re.findall(r"python3\.\d+", text)),
    }
    files = dict.fromkeys(stubs, _RECORD)
    files |= {"/bin/record": _RECORD, **given, inside: _going_on(text)}
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        user = _NOBODY if os.getuid() == _ROOT else os.getuid()
        job = {
            "root": root,
            "files": files,
            "copies": _copies(),
            "folders": ["/tmp", "/dev", _HERE, _HOME, _RECORDS],
            "records": _RECORDS,
            "folder": _HERE,
            "command": ["/bin/bash", inside, *arguments],
            "environment": {
                "PATH": "/bin",
                "HOME": _HOME,
                "LC_ALL": "C",
                "TMPDIR": "/tmp",
                "BASH_ENV": "/bin/prelude",
                **placeholders,
            },
            "seconds": most_seconds,
            "num_tasks": tasks_of_user(user) + _NUM_TASKS,
        }
        # A second timeout here ends a jail that exceeds its own timeout.
        code, report = run_in_jail(JAIL, job, 3 * most_seconds, stdin=subprocess.DEVNULL, stderr=output, cwd="/")
        output.seek(0)
        error = output.read().strip()[-400:]
    if code is None:
        raise ConfigError(f"{script} did not end within {3 * most_seconds} s. {_BY_HAND}")
    if code == NO_JAIL:
        raise ConfigError(
            "a script is expanded in a jail (Linux namespaces), which this machine does not grant, so nothing was run. "
            + _BY_HAND
        )
    if code or not report:
        raise ConfigError(f"{script} could not be expanded: {error}. {_BY_HAND}")
    return report


_BY_HAND = (
    "Let your own shell expand it: put `python -m rltrain.port -o NEW.sh --overrides` in the place of "
    "`python3 -m verl.trainer.main_ppo` and run the script."
)


def _going_on(text: str) -> str:
    """Return the script without options that end it at an error or unset variable."""
    text = re.sub(r"(?m)^(\s*set\s+-)([a-zA-Z]+)", lambda match: match[1] + re.sub("[eu]", "", match[2]) + "B", text)
    return re.sub(r"(?m)(\bset\s.*)-o\s+(errexit|nounset)", r"\1", text)


def _neighbours(script: Path) -> dict[str, str]:
    """Return small text files of the script's folder, by their path in the jail. Links are skipped: they may lead to
    any file."""
    contents: dict[str, str] = {}
    room = _MOST_BYTES
    for path in sorted(script.absolute().parent.glob("*")):
        if path.suffix not in _BESIDE or path.is_symlink() or not os.access(path, os.R_OK):
            continue
        if path.is_file() and (size := path.stat().st_size) <= room:
            room -= size
            contents[f"{_HERE}/{path.name}"] = _going_on(path.read_text("utf-8", "replace"))
    return contents


def _copies() -> dict[str, str]:
    """Return the text tools of this machine and their libraries: path in the jail -> file."""
    path = os.pathsep.join(("/usr/bin", "/bin", "/usr/local/bin"))
    tools = {
        f"/bin/{name}": os.path.realpath(place) for name in _TOOLS.split() if (place := shutil.which(name, path=path))
    }
    if "/bin/bash" not in tools:
        raise ConfigError(f"there is no bash on this machine to expand the script. {_BY_HAND}")
    listing = subprocess.run(["ldd", *tools.values()], capture_output=True, text=True).stdout
    libraries = {name: os.path.realpath(name) for name in re.findall(r"(/\S+) \(0x", listing)}
    return {**tools, "/bin/sh": tools["/bin/bash"], **libraries}


def inside_out(path: str) -> str:
    """Return a path of the jail relative to the folder in which the script runs."""
    return path.replace(f"{_HERE}/", "").replace(_HERE, ".")
