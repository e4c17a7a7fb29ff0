"""The tests that a change since main touches: `scripts/test.sh --changed`.

A file of tests is chosen if it has changed, if it imports what has changed, through other modules too, or if it names a
changed file that is no module. Imports are read from the sources and not recorded from a run, so that nothing has to be
kept up to date. Names of modules in strings count in tests alone: by the library's own, every setting would lead to
every engine. So does what puts a whole run together, where a test does not import it itself: by that, every door leads
to everything. The tests of whole runs take minutes and reach nearly every module: what changes below tests/ chooses
them, and of a change of the library the last line says that they were not.
"""

import ast
import fnmatch
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from rltrain.base.commands import home

ROOT = Path(__file__).parent.parent
WHOLE_RUNS = ("tests/e2e", "tests/faults", "tests/hosts")
_PUT_TOGETHER = "rltrain/run/build.py"
_MODULE = re.compile(r"\brltrain\.[\w.]+")
_FOLDERS = ("rltrain", "tests", "bench")


def changed_files(root: Path, base: str = "main") -> set[str]:
    """Committed since the branch left ``base``, staged, unstaged, untracked, deleted."""

    def git(*words: str) -> str:
        process = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        if process.returncode:
            raise SystemExit(
                f"error: git {' '.join(words)}: {process.stderr.strip()}\n"
                f"       --changed compares a checkout with its branch {base}. Try git fetch origin {base}:{base}."
            )
        return process.stdout

    since = git("merge-base", base, "HEAD").strip()
    changed = git("diff", "--name-only", "--no-renames", "-z", since)
    return set(f"{changed}{git('ls-files', '--others', '--exclude-standard', '-z')}".split("\0")) - {""}


class Module:
    """What one file imports, and names in its strings. A file that does not parse imports nothing."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text)
        except SyntaxError:
            self._tree = ast.Module([], [])
        nodes = list(_nodes(self._tree))
        self.imports = _imports(nodes)
        self.strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        # Words that may be names of fixtures.
        self.asked = self.strings | {node.arg for node in nodes if isinstance(node, ast.arg)}

    @cached_property
    def fixtures(self) -> dict[str, tuple[set[str], set[str]]]:
        """Of each function of a conftest, the words in it and what it imports: few tests ask for all of them."""
        top: dict[str, set[str]] = defaultdict(set)
        for name in _imports(self._tree.body):
            top[name.rpartition(".")[2]].add(name)
        functions = {}
        for node in self._tree.body:
            if isinstance(node, ast.FunctionDef):
                words = set(re.findall(r"\w+", ast.unparse(node)))
                inside = _imports(_nodes(node))
                functions[node.name] = words, inside.union(*(top[word] for word in words & top.keys()))
        return functions


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All below ``tree``, but for what types alone need."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            todo.extend(ast.iter_child_nodes(node))


def _imports(nodes: Iterable[ast.AST]) -> set[str]:
    """Full names, of what stands in a module as well as of modules."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


class Sources:
    """All Python files of a checkout, by their paths in it. gone: those that were deleted, which others may import."""

    def __init__(self, root: Path, gone: Iterable[str] = ()) -> None:
        files = [file for folder in _FOLDERS for file in (root / folder).rglob("*.py")]
        self.modules = {file.relative_to(root).as_posix(): Module(file.read_text()) for file in files}
        self.tests = sorted(name for name in self.modules if re.match(r"tests/(.*/)?test_[^/]*$", name))
        self.modules |= {name: Module("") for name in gone if name.endswith(".py") and name not in self.modules}

    def files_of(self, name: str) -> set[str]:
        """The modules that an import of ``name`` runs: it and the packages around it; below a dot, all."""
        if name.endswith("."):
            return {file for file in self.modules if file.startswith(name.replace(".", "/"))}
        parts = name.split(".")
        names = [".".join(parts[:number]) for number in range(1, len(parts) + 1)]
        paths = [(home(each) or each).replace(".", "/") for each in names]
        return {file for path in paths for file in (f"{path}.py", f"{path}/__init__.py") if file in self.modules}

    def next_to(self, file: str) -> set[str]:
        """What a module needs, one import away."""
        names = self.modules[file].imports
        if file.startswith("tests/"):
            strings = self.modules[file].strings
            return set().union(*map(self.files_of, names.union(*(_MODULE.findall(text) for text in strings))))
        return set().union(*map(self.files_of, names)) - {_PUT_TOGETHER}

    def reached(self, test: str) -> set[str]:
        """All modules that a file of tests needs, those of the fixtures that it names among them."""
        folders = [folder.as_posix() for folder in reversed(Path(test).parents)]
        fixtures = {
            name: parts
            for conftest in (f"{folder}/conftest.py" for folder in folders)
            if conftest in self.modules
            for name, parts in self.modules[conftest].fixtures.items()
        }
        waiting, used, todo = self.modules[test].asked & fixtures.keys(), set(), {test}
        while waiting:
            used |= waiting
            todo = todo.union(*(self.files_of(name) for each in waiting for name in fixtures[each][1]))
            waiting = {word for each in waiting for word in fixtures[each][0] & fixtures.keys()} - used
        seen: set[str] = set()
        while todo:
            file = todo.pop()
            if file not in seen and not (test.startswith(WHOLE_RUNS) and file.startswith("rltrain/")):
                seen.add(file)
                todo |= self.next_to(file)
        return seen

    def naming(self, changed: str) -> set[str]:
        """The files below tests/ that name a file, its folder where that holds data, or a pattern that it fits."""
        path = Path(changed)
        of_data = changed.startswith("tests/") and path.parent not in {Path(test).parent for test in self.tests}
        words = [path.name, *([path.parent.name] if of_data else [])]
        named = re.compile("|".join(rf"(?<![\w.-]){re.escape(word)}(?![\w-])" for word in words))
        return {
            file
            for file, module in self.modules.items()
            if file.startswith("tests/") and (named.search(module.text) or _fits(changed, module.strings))
        }


def _fits(path: str, strings: set[str]) -> bool:
    patterns = (text.replace("**/", "*") for text in strings if re.fullmatch(r"[\w./*-]*\*[\w./*-]*\w\w", text))
    return any(fnmatch.fnmatch(each, pattern) for pattern in patterns for each in (path, path.rpartition("/")[2]))


def _touched(sources: Sources, reached: dict[str, set[str]], file: str) -> set[str]:
    folder, _, name = file.rpartition("/")
    if name == "conftest.py":
        return {test for test in reached if test.startswith(f"{folder}/")}
    if found := {test for test in reached if file in reached[test]}:
        return found
    if file in sources.modules and file.startswith("rltrain/"):
        # It is loaded by a name that somebody puts together, or by a whole run alone: the tests of its room.
        return {test for test in reached if test.startswith(f"tests/{file.split('/')[1]}/")}
    named = sources.naming(file)
    return {test for test in reached if not named.isdisjoint(reached[test])}


def choose(root: Path, changed: set[str]) -> tuple[list[str], str]:
    """The files of tests that a change touches, and a line on those that it may touch besides."""
    sources = Sources(root, changed)
    reached = {test: sources.reached(test) for test in sources.tests}
    touched = {file: _touched(sources, reached, file) for file in sorted(changed)}
    chosen = sorted(set().union(*touched.values()))
    words = [f"{len(chosen)} of {len(sources.tests)} files of tests chosen"]
    if untested := [file for file, tests in touched.items() if not tests and (root / file).exists()]:
        words.append(f"none imports or names {' '.join(untested)}")
    runs = [folder for folder in WHOLE_RUNS if not any(test.startswith(f"{folder}/") for test in chosen)]
    if runs and any(file.startswith("rltrain/") for file in changed):
        words.append(f"whole runs may use it too and were not chosen: {' '.join(runs)}")
    return chosen, "; ".join(words)


def main() -> None:
    """Prints the chosen files, those of a folder in one line, and writes into the file argv[1] what is to be said."""
    chosen, words = choose(ROOT, changed_files(ROOT))
    Path(sys.argv[1]).write_text(f"{words}\n")
    folders = defaultdict(list)
    for test in chosen:
        folders[test.rpartition("/")[0]].append(test)
    for tests in sorted(folders.values(), key=len, reverse=True):
        print(*tests)
    if not chosen:
        raise SystemExit(5)  # as pytest says it


if __name__ == "__main__":
    main()
