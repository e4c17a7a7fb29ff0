"""Composition of YAML files with Hydra's ``defaults:`` lists, without Hydra.

verl's recipes are such files. A list is composed as in Hydra. verl's stock files contain verl's defaults, so they are
not read. ``override`` of a choice of an earlier file and groups chosen on the command line are not supported.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import ScalarToken, StreamEndToken, Token, YAMLError, scan

from rltrain.common.errors import ConfigError
from rltrain.config.verl.other_trainers import refusal, trainer_of
from rltrain.config.verl.table import rows

Tree = dict[str, Any]

# Tokens of a value: quoted texts, openings of interpolations and single characters.
_WORDS = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\$\{|.""", re.DOTALL)
# First characters of values that are parsed as YAML, not by Hydra's rules.
OPENINGS = ("{", "[", "'", '"')
# Words for on and off, alternating.
SWITCHES = ("true", "false", "yes", "no", "on", "off", "y", "n", "1", "0")
_WORDS_WITH_A_VALUE = {
    "": None, "~": None, "null": None, "true": True, "yes": True, "on": True, "false": False, "no": False, "off": False,
}  # fmt: skip
_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"(?i)[+-]?(([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|\.inf|\.nan)")
# Numbers that YAML 1.1 reads as octal or in base sixty.
_ODD_NUMBER = re.compile(r"[+-]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
# verl's stock files by name, with the relevant settings that differ from verl's defaults.
_DAPO: Tree = {"reward_model": {"reward_manager": "dapo"}, "trainer": {"project_name": "verl-dapo"}}
_STOCK: dict[str, Tree] = {
    "ppo_trainer": {}, "ppo_megatron_trainer": {}, "ppo_veomni_trainer": {}, "ppo_torchtitan_trainer": {},
    "ppo_mindspeed_trainer": {}, "ppo_fsdp_turbo_trainer": {}, "dapo_trainer": _DAPO, "dapo_megatron_trainer": _DAPO,
}  # fmt: skip
# Folders of verl's config tree: a missing file in one of them holds verl's defaults.
_STOCK_GROUPS = (
    *("actor", "algorithm", "critic", "data", "distillation", "engine", "legacy_reward_impl", "model", "model_engine"),
    *("npu_profile", "optim", "profiler", "ref", "reward", "reward_manager", "reward_model", "rollout"),
    "transfer_queue",
)

_NOT_YAML = {
    ".toml": "TOML is not supported. Write the settings as YAML into a .yaml file.",
    ".sh": "scripts are not supported. rltrain port translates launch scripts of verl.",
}


def compose(file: Path, roots: Sequence[Path] = ()) -> Tree:
    """Return the settings of a YAML file and of all files in its ``defaults:`` list; later files win.

    roots: folders to search in addition to the file's folder. Raises ConfigError with every missing file.
    """
    _refuse_recipe(f"--config {file}", file.stem)
    content = read_yaml(file)[1]
    if (trainer := trainer_of(content)) is not None:
        raise ConfigError(refusal(*trainer, f"--config {file}: this is a configuration", content))
    composer = _Composer([file.parent, *roots])
    composer.merge(file, "", "")
    if composer.problems:
        raise ConfigError("\n".join(composer.problems))
    composer.tree.pop("hydra", None)
    return composer.tree


def _refuse_recipe(written: str, name: str) -> None:
    if recipe := next((row.to for row in rows("file") if row.key == name), ""):
        raise ConfigError(
            f"{written}: {name}.yaml is the configuration of verl's recipe {recipe}, a separate trainer that is not in "
            "this version. Give a configuration of PPO or GRPO, or rename your file."
        )


def flow(text: str) -> str:
    """Return a value in Hydra's syntax as YAML, which needs a space after a key.

    ``{a:1,b:http://x}`` becomes ``{a: 1,b: http://x}``.
    """
    if text.lstrip()[:1] not in ("{", "["):
        return text
    words, open_ = list[str](), [""]
    for word in _WORDS.findall(text):
        if word in ("{", "[", "${"):
            open_.append("key" if word == "{" else "")
        elif word in ("}", "]"):
            open_ = open_[:-1] or [""]
        elif word == "," and open_[-1] == "value":
            open_[-1] = "key"
        elif word == ":" and open_[-1] == "key":
            # Later colons belong to the value.
            open_[-1], word = "value", ": "
        words.append(word)
    return "".join(words)


def parsed(text: str) -> Any:
    """Return the value of a text on the command line; interpolations are kept. Raises YAMLError or an OmegaConf error.

    Brackets and quotes are parsed as YAML. Everything else is read as in Hydra, not as in YAML 1.1, where 064 is 52,
    1:20 is 80 and " #1" is not part of a name.
    """
    word = text.strip()
    if not word.startswith(OPENINGS):
        return _scalar(word)
    tokens = [token for token in scan(flow(word)) if not isinstance(token, StreamEndToken)]
    if odd_number := next(_odd_numbers(tokens), None):
        raise YAMLError(odd_number[1])
    if rest := flow(word)[tokens[-1].end_mark.index :].strip():
        raise YAMLError(f"{rest} would be read as a comment")
    tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={flow(word)}"]), resolve=False)
    return tree["value"]


def unquoted(value: Any, *, switches: bool) -> Any:
    """Return the number in a quoted text of a file and, with ``switches``, the switch that a word such as 1 means."""
    word = str(value).lower()
    if switches and word in SWITCHES:
        return SWITCHES.index(word) % 2 == 0
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _scalar(word: str) -> Any:
    if word.lower() in _WORDS_WITH_A_VALUE:
        return _WORDS_WITH_A_VALUE[word.lower()]
    # Python refuses to parse longer integers.
    if _INTEGER.fullmatch(word) and len(word) < 4300:
        return int(word)
    return float(word.lower().replace(".inf", "inf").replace(".nan", "nan")) if _FLOAT.fullmatch(word) else word


def _odd_numbers(tokens: Iterable[Token]) -> Iterator[tuple[int, str]]:
    """Yield (line from 0, message) of each number that YAML 1.1 reads differently than it looks."""
    for token in tokens:
        if isinstance(token, ScalarToken) and token.plain and _ODD_NUMBER.fullmatch(token.value):
            base = "of base sixty" if ":" in token.value else "octal"
            way_out = "" if ":" in token.value else "write it without the 0 in front, or "
            yield token.start_mark.line, f"{token.value} is {base} in YAML: {way_out}put it in quotes if it is a text"


def stock(name: str) -> Tree | None:
    """Return the settings of verl's stock file ``name`` that differ from verl's defaults, or None for other names."""
    return _STOCK.get(Path(name).name.removesuffix(".yaml").removesuffix(".yml"))


def named(config_path: str | None, config_name: str | None, config_dir: str | None = None) -> Tree:
    """Return the settings selected by Hydra's flags with these names. Raises ConfigError.

    A stock file of verl need not exist.
    """
    name = (config_name or "ppo_trainer").removesuffix(".yaml")
    folders = [Path(folder).expanduser() for folder in (config_path, config_dir) if folder]
    for folder in folders or [Path()]:
        # Without a folder, a stock file of verl takes precedence over a file of the same name in the working directory.
        if (folder / f"{name}.yaml").is_file() and (folders or stock(name) is None):
            return compose(folder / f"{name}.yaml", folders)
    if (stock_tree := stock(name)) is not None:
        return stock_tree
    flags = {"--config-path": config_path, "--config-name": config_name, "--config-dir": config_dir}
    written = " ".join(f"{flag} {value}" for flag, value in flags.items() if value)
    _refuse_recipe(written, name)
    raise ConfigError(
        f"{written}: there is no file {name}.yaml in {' or '.join(map(str, folders)) or 'this folder'}, and it is not "
        "one of verl's files. Give its folder, or --config FILE."
    )


class _Composer:
    """Walker of defaults lists, depth first, in Hydra's order."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots, self.tree, self.problems = list(roots), Tree(), list[str]()
        self._chosen: dict[str, str] = {}

    def merge(self, file: Path, group: str, package: str) -> None:
        """Merge ``file`` and the files of its list.

        group: its folder within its root. package: dotted key under which its content is placed.
        """
        text, content = read_yaml(file)
        if header := re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE):
            package = "" if header[1] == "_global_" else package if header[1] in ("_group_", "_here_") else header[1]
        if not group:
            self.roots += _search_path(content, file)
        entries = content.pop("defaults", None) or []
        has_self = "_self_" in entries
        # If `_self_` is missing, the files of the list override this file, so it is merged first.
        for entry in entries if has_self else ["_self_", *entries]:
            if entry == "_self_":
                _merge(self.tree, _under(package, content))
            else:
                for name, option in entry.items() if isinstance(entry, dict) else [(entry, "")]:
                    self._entry(str(name), option, group, package, file)

    def _entry(self, name: str, option: Any, group: str, package: str, file: Path) -> None:
        words = name.split()
        path, _, place = words[-1].partition("@")
        for choice in option if isinstance(option, list) else [option]:
            if choice is None or choice == "_self_":
                continue
            choice = re.sub(r"\$\{(\w+)\}", lambda match: self._chosen.get(match[1], ""), str(choice))
            full = posixpath.normpath(posixpath.join("/", group, path, choice)).lstrip("/")
            self._chosen[path] = choice
            below = posixpath.dirname(full) if not place else ""
            inner = place if place else posixpath.relpath(below or ".", group or ".").replace("/", ".").strip(".")
            under = (
                ""
                if place == "_global_"
                else ".".join(part for part in (package, inner.removeprefix("_here_")) if part)
            )
            entry_file = next((at for root in self.roots if (at := root / f"{full}.yaml").is_file()), None)
            if entry_file:
                self.merge(entry_file, posixpath.dirname(full), under)
            elif (stock_tree := stock(full)) is not None:
                _merge(self.tree, stock_tree)
            elif full.split("/")[0] not in _STOCK_GROUPS and "optional" not in words:
                where = ", ".join(str(root) for root in dict.fromkeys(self.roots))
                self.problems.append(f"{file}: there is no {full}.yaml in {where} (defaults: {name}).")


def read_yaml(file: Path) -> tuple[str, Tree]:
    """Return text and content of a file that holds a mapping. Raises ConfigError."""
    if file.suffix in _NOT_YAML:
        raise ConfigError(f"--config {file}: {_NOT_YAML[file.suffix]}")
    try:
        text = file.read_text(encoding="utf-8")
        content = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else {}
    except OSError as error:
        raise ConfigError(f"--config {file}: {'there is no such file' if not file.exists() else error}.") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: expected a mapping of keys to values.")
    if odd_numbers := [f"--config {file}, line {line + 1}: {why}." for line, why in _odd_numbers(scan(text))]:
        raise ConfigError("\n".join(odd_numbers))
    return text, {str(key): value for key, value in content.items()}


def _search_path(content: Tree, file: Path) -> list[Path]:
    """Return Hydra's search path, relative to the working directory or a folder above the file."""
    hydra = content.get("hydra")
    entries = (hydra.get("searchpath") if isinstance(hydra, dict) else None) or content.get("hydra.searchpath") or []
    bases = [Path.cwd(), *file.absolute().parents]
    places = [re.sub(r"^(file|pkg)://", "", str(entry)) for entry in entries]
    places = [
        place.replace(".", "/") if str(entry).startswith("pkg:") else place
        for place, entry in zip(places, entries, strict=True)
    ]
    return [base / place for place in places for base in bases if (base / place).is_dir()]


def _under(package: str, content: Tree) -> Tree:
    for part in reversed(package.split(".") if package else []):
        content = {part: content}
    return content


def _merge(tree: Tree, other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            # The value is copied, because later files are merged into it.
            tree[key] = OmegaConf.to_container(OmegaConf.create(dict(value))) if isinstance(value, Mapping) else value
