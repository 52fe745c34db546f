"""House rules that a reader would otherwise have to check by eye: nothing unsafe, nothing huge, no private paths."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from house_numbers import CORE, files_in_a_step, files_loaded, lines_of, num_lines, overridable_methods, private_reaches
from retired_words import EXCEPTIONS, retired_names, retired_prose, retired_words

SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [
    *(p for suffix in ("js", "html", "md") for p in sorted((ROOT / "src").rglob(f"*.{suffix}"))),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS = 600, 60, 12

# Of the whole package, of the core, and of `System`.
MAX_SRC, MAX_CORE, MAX_METHODS = 56_000, 15_000, 10
# What a run of gpt/demo loads, and the files that a steady-state step goes through.
MAX_MODULES, MAX_LINES, MAX_STEP_FILES = 60, 9_000, 12

# file or file:function -> why it may be longer
LONG: dict[str, str] = {}

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "__import__", "torch.load", "torch.save", "os.system", "os.popen"}
UNSAFE_KEYWORDS = {("shell", True), ("weights_only", False), ("allow_pickle", True)}


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Ways to run what a stranger wrote, found in the syntax tree: `model.eval()` is not `eval()`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        yield from (f"line {node.lineno}: imports {n}" for n in names if n.split(".")[0] in UNSAFE_MODULES or n in UNSAFE_CALLS)
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in UNSAFE_CALLS:
                yield f"line {node.lineno}: {ast.unparse(node.func)}("
            for word in node.keywords:
                if isinstance(word.value, ast.Constant) and (word.arg, word.value.value) in UNSAFE_KEYWORDS:
                    yield f"line {node.lineno}: {word.arg}={word.value.value}"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_sources_are_found():
    assert len(SOURCES) > 5


def assigned_twice(tree: ast.Module) -> Iterator[str]:
    """Constants of a module that are given a second value, which does not build on the first: two things with one name."""
    seen: set[str] = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        stored = (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        names = {n.id for n in stored if n.id.isupper()}
        built_on = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)} if names and node.value else set()
        yield from (f"line {node.lineno}: {name}" for name in sorted(names & seen - built_on))
        seen |= names


def test_second_value_of_a_constant_is_found():
    assert list(assigned_twice(ast.parse("A, B = 1, 2\nC = 3\nA, D = 4, 5\n"))) == ["line 3: A"]
    assert not list(assigned_twice(ast.parse("A = 1\nA = A + 1\na = 1\na = 2\n")))


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_source_file_follows_the_house_style(path: Path):
    text = path.read_text()
    tree = ast.parse(text)
    wrong = list(unsafe(tree)) + [f"assigned twice, {found}" for found in assigned_twice(tree)]
    if text.strip():
        lines = (ast.get_docstring(tree) or "").strip().splitlines()
        # A summary, and where one sentence is not enough a blank line and a second paragraph.
        if not 1 <= len(lines) <= 5:
            wrong.append(f"module docstring has {len(lines)} lines; one to three say what the file is for")
    if len(text.splitlines()) > MAX_FILE and short(path) not in LONG:
        wrong.append(f"{len(text.splitlines())} lines; at most {MAX_FILE}")
    for name, node in functions(tree):
        size = (node.end_lineno or 0) - node.lineno + 1
        if size > MAX_FUNCTION and f"{short(path)}:{name}" not in LONG:
            wrong.append(f"{name} has {size} lines; at most {MAX_FUNCTION}")
        count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - (node.name == "__init__")
        if count > MAX_ARGUMENTS:
            wrong.append(f"{name} takes {count} arguments; at most {MAX_ARGUMENTS}")
    assert not wrong, f"{short(path)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import save",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "np.load(p, allow_pickle=True)",
        "eval('1')",
        "load(p, weights_only=False)",
        "import os\nos.system('ls')",
    ],
)
def test_safety_check_catches(code: str):
    assert list(unsafe(ast.parse(code)))


@pytest.mark.parametrize("code", ["model.eval()", "re.compile('x')", "run(['ls'], shell=False)", "pickled = 1"])
def test_safety_check_lets_pass(code: str):
    assert not list(unsafe(ast.parse(code)))


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        return [p for p in SOURCES if p.is_file()]
    return [p for name in listed.stdout.split("\0") if name and (p := ROOT / name).is_file()]


def test_machine_paths_are_in_no_file():
    # Split so that this file does not find itself.
    pattern = re.compile(r"/(?:work|root|home|Users|opt)" + r"/[\w.-]+")
    texts = {short(p): p.read_text() for p in tracked() if p.suffix in {".py", ".md", ".toml", ".json", ""}}
    wrong = {f"{name}: {found}" for name, text in texts.items() for found in pattern.findall(text)}
    assert not wrong


def test_exceptions_to_the_size_rule_are_still_needed():
    gone = [key for key in LONG if not (ROOT / key.partition(":")[0]).is_file()]
    assert not gone
    assert all(LONG.values())


def test_exit_codes_are_defined_in_one_module():
    """`seedbed.errors` holds them all; no other module assigns a name such as EXIT_OK."""
    assigned = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.startswith("EXIT_")
    ]
    assert not assigned


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=short)
def test_retired_words_are_not_used(path: Path):
    """Help of the command line and messages are strings of the sources, so they are covered too."""
    found = retired_words(path)
    allowed = EXCEPTIONS.get(short(path), set())
    wrong = [f"{short(path)}:{line}: `{word}` is retired; use: {new}" for line, word, new in found if word not in allowed]
    assert not wrong, "\n".join(wrong)
    unused = allowed - {word for _, word, _ in found}
    assert not unused, f"remove from EXCEPTIONS of tests/retired_words.py: {short(path)} {sorted(unused)}"


def test_retired_words_exceptions_name_files_that_exist():
    assert EXCEPTIONS.keys() <= {short(p) for p in (*SOURCES, *PAGES)}


@pytest.mark.parametrize(
    "code",
    [
        "def roll_dice(): pass",
        "class _DiceTable: pass",
        "forked_dice = 1",
        "self.engine.calm = 1",
        "ranks.tell(1)",
        "self._ranks.behind.meet()",
        "class House: pass",
        "def f(is_alone): pass",
        "told: str = ''",
        "import x as parcels",
    ],
)
def test_retired_names_are_found(code: str):
    assert list(retired_names(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "np.take(x, i)",
        "def place(x): pass",
        "gc.collect()",
        "heartbeat = 1",
        "class WorldPlayer: pass",
        "dist.rate = 1",
        "def foretold(): pass",
        "indice = 2",
        "warehouse = 1",
        "class TakeAction: pass",
        "walkable_N = x",
    ],
)
def test_retired_names_pass_ordinary_ones(code: str):
    assert not list(retired_names(ast.parse(code)))


@pytest.mark.parametrize(
    ("text", "is_retired"),
    [
        ("the numbers on paper", True),
        ("it learns them by\nheart", True),
        ("the file lies there", True),
        ("Whole battery", True),
        ("dead reckoning from the controls", False),
        ("the value lies between 0 and 1", False),
        ("a talk by its authors", False),
        ("the paper's learning rate", False),
        ("indices", False),
    ],
)
def test_retired_expressions_are_found_in_prose(text: str, is_retired: bool):
    assert bool(list(retired_prose(iter([(1, text)])))) == is_retired


def test_package_and_core_have_a_size_limit():
    assert num_lines() <= MAX_SRC
    assert num_lines(*CORE) <= MAX_CORE


def test_system_has_few_overridable_methods():
    assert len(overridable_methods()) <= MAX_METHODS


def test_private_names_of_other_modules_are_not_used():
    assert private_reaches() == []


def test_training_run_loads_few_modules():
    prepared, preparing = files_loaded()
    for loaded in (prepared, preparing):
        found = f"{len(loaded)} modules, {lines_of(loaded):,} lines"
        assert len(loaded) <= MAX_MODULES and lines_of(loaded) <= MAX_LINES, (found, sorted(map(short, loaded)))


def test_training_step_goes_through_few_files():
    touched, _ = files_in_a_step()
    assert len(touched) <= MAX_STEP_FILES, sorted(map(short, touched))
