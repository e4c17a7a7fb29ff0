"""The rules of CONTRIBUTING.md that a program can check."""

import ast
import io
import re
import tokenize
import warnings
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from rltrain.config.schema.keys import is_known
from tests import tables

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rltrain"
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Folders and top-level files by floor, from top to bottom. An import stays on its floor or goes down.
FLOORS = [
    {"__init__", "__main__", "commands", "tools", "run", "api", "main_ppo"},
    {"trainer"},
    {"workers"},
    {"models", "data", "data_preprocess", "agents", "rewards"},
    {"runtime", "config", "algorithms", "common"},
]
# Where a heavy package may be imported.
HOMES = {
    "ray": (
        "main_ppo.py",
        "runtime/",
        "rewards/processes/actors.py",
        "rewards/processes/pool.py",
        "rewards/processes/scoring.py",
        "rewards/processes/worker.py",
        "run/report/sample_writer.py",
    ),
    "vllm": ("workers/rollout/vllm/",),
    "sglang": ("workers/rollout/sglang/engine.py",),
    "transformers": (
        "models/",
        "agents/",
        "data/loading.py",
        "workers/rollout/embedded/",
        "run/preflight/small.py",
    ),
    "torch_npu": ("common/device.py",),
    "peft": ("models/weights/lora.py",),
}


@cache
def parsed(text: str) -> ast.Module:
    """Return the syntax tree, shared by several rules, so do not change it."""
    return ast.parse(text)


@cache
def imports(file: Path) -> frozenset[str]:
    found = set()
    for node in ast.walk(parsed(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def floor(module: str) -> int:
    """Return the index in FLOORS of a module of rltrain."""
    return next(number for number, rooms in enumerate(FLOORS) if [*module.split("."), "__init__"][1] in rooms)


@cache
def import_graph() -> dict[str, set[str]]:
    """Return the modules of rltrain that each of them imports, also in functions and under TYPE_CHECKING."""
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}
    graph: dict[str, set[str]] = {module: set() for module in files}
    for module, file in files.items():
        for node in ast.walk(parsed(file.read_text())):
            if isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names if alias.name in files}
            elif isinstance(node, ast.ImportFrom) and node.module in files:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[module] |= {name if name in files else node.module for name in names}
    return graph


def test_imports_stay_on_their_floor_or_go_down():
    graph = import_graph()
    climbing = {(module, other) for module in graph for other in graph[module] if floor(other) < floor(module)}
    assert climbing == set()


def test_no_module_imports_itself_through_others():
    """Raises CycleError with the cycle."""
    TopologicalSorter(import_graph()).prepare()


def test_files_that_share_a_prefix_have_a_folder():
    for place in {file.parent for file in FILES if "data_preprocess" not in file.parts}:
        words = Counter(file.stem.split("_")[0] for file in place.glob("[a-z]*.py"))
        assert not {word for word, number in words.items() if number > 2}, place
    # A folder that has moved leaves its __pycache__ behind in an older checkout.
    # py.typed is no room: a mark for type checkers.
    rooms = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))]
    assert len([path for path in rooms if not path.name.startswith("__")]) <= 16


def test_few_files_know_the_whole_config():
    """All others receive their sections."""
    assert sum("rltrain.config.schema.Config" in imports(file) for file in FILES) <= 40


def test_a_folder_has_at_most_16_files():
    """Sub-folders and `__init__.py` are not counted. Converters have one file per data set."""
    sizes = Counter(file.parent for file in FILES if file.stem != "__init__" and file.parent.name != "data_preprocess")
    assert {str(place): size for place, size in sizes.items() if size > 16} == {}


def test_tools_are_programs():
    for file in (PACKAGE / "tools").glob("[a-z]*.py"):
        assert "main" in {getattr(node, "name", "") for node in parsed(file.read_text()).body}, file


def test_a_program_defines_everything_before_it_starts():
    """``python -m`` runs ``main()`` where it stands, before the definitions below it."""
    for file in FILES:
        last = [
            ast.unparse(node) for node in parsed(file.read_text()).body if isinstance(node, ast.FunctionDef | ast.If)
        ]
        starts = [number for number, text in enumerate(last) if "sys.exit(main())" in text]
        assert starts in ([], [len(last) - 1]), file


def test_heavy_packages_stay_in_their_homes():
    wrong = []
    for file in FILES:
        own = str(file.relative_to(PACKAGE))
        for name in imports(file):
            homes = HOMES.get(name.split(".")[0])
            if homes is not None and not own.startswith(homes):
                wrong.append(f"{own} may not import {name}")
    assert not wrong


def test_only_device_py_knows_accelerators():
    files = [file for file in FILES if file.name != "device.py"]
    assert not [str(file) for file in files if re.search(r"torch\.(cuda|npu)\b", file.read_text())]


def test_config_needs_neither_torch_nor_ray():
    for file in (PACKAGE / "config").rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(file)} & {"torch", "ray", "transformers"}, file


def test_files_and_functions_stay_small():
    for file in FILES:
        text = file.read_text()
        if (number := len(text.splitlines())) > 400:
            warnings.warn(f"{file} has {number} lines: does it hide a concept?", stacklevel=1)
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 70, f"{file}: {node.name} does not fit a screen"


def lines_of_code(text: str) -> int:
    """Return the number of lines with code: without blank lines, comments, and docstrings (which are the help text in
    the config)."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


# Lines of code of the library without converters, rounded up to the next ten. A ratchet: it falls with the library
# and rises only by a number that was granted before the work.
LIBRARY_CEILING = 42_320


def test_the_library_only_shrinks():
    """Converters are not counted, because there is one small file per data set."""
    assert lines_of_code('"""Doc."""\n\n# why\nx = 1\n') == 1
    library = [file for file in FILES if "data_preprocess" not in file.parts]
    size = sum(lines_of_code(file.read_text()) for file in library)
    assert -(-size // 10) * 10 == LIBRARY_CEILING, f"{size} lines: remove some, or lower the ceiling to the size"


# The same of tests/: lines of code, rounded up to the next hundred; and lines that replace parts of the library or
# reach into them.
TESTS_CEILINGS = {"lines": 37_700, "monkeypatch.setattr": 80, "private attributes": 74}
# Reads of the clock and sleeps for a fixed time in tests: how many, and why nothing else does.
CLOCK = {
    "tests/clock.py": (1, "it does both for all other tests"),
    "tests/faults/trapping.py": (3, "it looks at the frames of a worker that knows nothing of tests"),
    "tests/hosts/wire.py": (3, "it delays the packets of a network"),
}
_PRIVATE = re.compile(r"(?<!\bself)(?<!\bcls)(?<=[\w\])])\._[a-z]\w*")


def test_the_tests_only_shrink():
    texts = [file.read_text() for file in TESTS]
    lines = [line for text in texts for line in text.splitlines()]
    found = {
        "lines": -(-sum(map(lines_of_code, texts)) // 100) * 100,
        "monkeypatch.setattr": sum("monkeypatch.setattr" in line for line in lines),
        "private attributes": sum(bool(_PRIVATE.search(line)) for line in lines),
    }
    assert found == TESTS_CEILINGS, "remove some, or lower the ceilings to what is found"


def test_no_test_reads_the_clock_or_sleeps_for_a_fixed_time():
    """On a busy machine such a test fails; use tests/clock.py."""
    found: Counter[str] = Counter()
    for file in TESTS:
        for node in ast.walk(parsed(file.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if re.fullmatch(r"time\.(monotonic|perf_counter|process_time|time|sleep)(_ns)?|asyncio\.sleep", name):
                found[str(file.relative_to(ROOT))] += ast.unparse(node) != "asyncio.sleep(0)"
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                found[str(file.relative_to(ROOT))] += 1
    assert +found == {name: number for name, (number, _) in CLOCK.items()}


def test_faults_and_smoke_tests_stand_in_the_tables_of_the_docs():
    page = tables.PAGE.read_text()
    assert tables.rows(page, "faults").keys() == tables.marked("fault").keys()
    promises = {test: line.split(" | ")[0].removeprefix("| ") for test, line in tables.rows(page, "smoke").items()}
    assert promises == tables.marked("smoke")


def test_the_top_level_shows_rooms_nobody_imports_through():
    for name in ("trainer", "workers", "data_preprocess"):
        assert (ROOT / name).resolve() == PACKAGE / name
    for file in [*FILES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]:
        assert not {name.split(".")[0] for name in imports(file)} & {"trainer", "workers", "data_preprocess"}, file


def test_text_is_read_and_written_in_an_encoding_that_is_named():
    """Ruff's PLW1514 checks only calls of `open` whose type it knows."""
    for file in FILES:
        for node in ast.walk(parsed(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("read_text", "write_text"):
                named = any(keyword.arg == "encoding" for keyword in node.keywords)
                assert named or len(node.args) > (node.func.attr == "write_text"), f"{file}:{node.lineno}"


def test_public_functions_and_classes_say_what_they_are():
    # Functions registered under a config name, protocol members and overrides speak through their class.
    missing = []
    for file in FILES:
        for node in parsed(file.read_text()).body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and node.name != "main" and not ast.get_docstring(node):
                missing.append(f"{file.relative_to(ROOT)}: {node.name}")
    assert not missing


def test_modules_that_are_named_exist():
    """Docstrings and comments name modules as `room.module` and `room.module.name`; keys of the configuration are
    excluded."""
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    stale = []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r"(?<!`)`((?:\w+\.)+\w+)`(?!`)", text):
            parts = name.removeprefix("rltrain.").split(".")
            places = [PACKAGE.joinpath(*parts[:length]) for length in range(len(parts), 0, -1)]
            source = next((place for place in places if place.with_suffix(".py").is_file() or place.is_dir()), None)
            if parts[0] not in rooms or is_known(name) or source is None:
                continue
            code = source.with_suffix(".py") if source.with_suffix(".py").is_file() else source / "__init__.py"
            rest = parts[len(source.relative_to(PACKAGE).parts) :]
            if rest and not re.search(rf"\b{rest[0]}\b", code.read_text(encoding="utf-8")):
                stale.append(f"{file.relative_to(ROOT)}: {name}")
    assert not stale


def test_a_field_of_a_record_has_its_docstring_under_it():
    """It must not be in the docstring of the class."""
    glossed = []
    for file in FILES:
        for node in ast.walk(parsed(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
                said = " ".join((ast.get_docstring(node) or "").split())
                fields = [
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                ]
                glossed += [
                    f"{file.name}: {node.name}.{name}" for name in fields if re.search(rf"(^|\. ){name}: ", said)
                ]
    assert not glossed


def test_main_guard_of_the_repo_speaks_of_the_project_alone():
    forbidden = re.compile(r"/work/|issue #?\d+|pypi\.org|this session", re.IGNORECASE)
    patterns = ("*.md", "scripts/*", "examples/*", "docs/**/*", "rltrain/**/*.py")
    for file in [file for pattern in patterns for file in ROOT.glob(pattern)]:
        if file.is_file() and file.suffix in (".md", ".py", ".sh", ".txt", ""):
            assert not forbidden.search(file.read_text()), file


def test_contributing_names_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    source = "".join(file.read_text() for file in FILES)
    for decorator in re.findall(r"`@(\w+)\(", text):
        assert f"def {decorator}(" in source, decorator
    for path in re.findall(r"`([\w/]+\.(?:py|sh|md|txt))", text) + re.findall(r"docs/\w+\.md", text):
        assert any((folder / path).is_file() for folder in (ROOT, PACKAGE, *PACKAGE.iterdir())), path


# CONTRIBUTING.md: sentences have a subject and a verb. Matches per 10,000 words of the docs; the numbers only fall.
HEADLESS = {
    r"\bwhat (is|are|was|were|has|have|can|must|it|they|a|the|each|one|no|[a-z]+s)\b": 3,
    r"\bthose (that|of|who|which)\b": 0.5,
    r"\b(nobody|somebody|anybody|whoever|whom)\b": 0.2,
    r"\b(told|tells? of|foretold|foretells?)\b": 0.2,
    r"\bbeside\b": 0.3,
    r"\bbehind\b": 1,
    r"\bof (its|their|one's) own\b": 0.2,
    r"\bgo(es)? on\b": 0.2,
}


# The same for docstrings and comments of rltrain/.
HEADLESS_IN_CODE = dict(zip(HEADLESS, (1, 0.5, 0.2, 0.2, 0.3, 0.3, 0.2, 0.2), strict=True))
WH_WORDS = re.compile(r"(what|who|whether|how|where|which|those|that|of|in|when)\b", re.IGNORECASE)


def above(limits: dict[str, float], text: str) -> dict[str, float]:
    """Return the patterns whose matches per 10,000 words of the text are above their limit."""
    found = {rule: len(re.findall(rule, text, re.IGNORECASE)) * 1e4 / len(text.split()) for rule in limits}
    return {pattern: rate for pattern, rate in found.items() if rate > limits[pattern]}


def test_the_docs_are_in_plain_english():
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    text = "\n".join(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL) for page in pages)
    assert above(HEADLESS, text) == {}


def test_docstrings_and_comments_are_in_plain_english():
    sources = [file.read_text() for file in FILES]
    nodes = [node for source in sources for node in ast.walk(parsed(source))]
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = [text for node in documented if (text := ast.get_docstring(node))]
    tokens = [token for source in sources for token in tokenize.generate_tokens(io.StringIO(source).readline)]
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    assert above(HEADLESS_IN_CODE, "\n".join(docstrings + comments)) == {}
    assert [text for text in docstrings if WH_WORDS.match(text)] == []
