"""House rules that a reader would otherwise have to check by eye: nothing unsafe, nothing huge, no private paths."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS = 600, 60, 12

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


def test_there_is_something_to_check():
    assert len(SOURCES) > 5


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_source_file_keeps_the_house_rules(path: Path):
    text = path.read_text()
    tree = ast.parse(text)
    wrong = list(unsafe(tree))
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
def test_the_safety_check_catches(code: str):
    assert list(unsafe(ast.parse(code)))


@pytest.mark.parametrize("code", ["model.eval()", "re.compile('x')", "run(['ls'], shell=False)", "pickled = 1"])
def test_the_safety_check_lets_pass(code: str):
    assert not list(unsafe(ast.parse(code)))


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        return [p for p in SOURCES if p.is_file()]
    return [p for name in listed.stdout.split("\0") if name and (p := ROOT / name).is_file()]


def test_no_file_names_a_machine():
    # Split so that this file does not find itself.
    pattern = re.compile(r"/(?:work|root|home|Users|opt)" + r"/[\w.-]+")
    texts = {short(p): p.read_text() for p in tracked() if p.suffix in {".py", ".md", ".toml", ".json", ""}}
    wrong = {f"{name}: {found}" for name, text in texts.items() for found in pattern.findall(text)}
    assert not wrong


def test_exceptions_to_the_size_rule_are_still_needed():
    gone = [key for key in LONG if not (ROOT / key.partition(":")[0]).is_file()]
    assert not gone
    assert all(LONG.values())
