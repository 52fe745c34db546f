"""Counts what tests/test_style.py and CONTRIBUTING.md promise about the structure of src; run as a script, prints all numbers."""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "seedbed"
CORE = ("config", "errors.py", "nn", "data", "train", "dist", "track")

# Underscored, and yet others' public interface: of named tuples, of torch's modules, of datasets.
NOT_PRIVATE = {"_replace", "_asdict", "_fields", "_make", "_buffers", "_compiled_call_impl", "_fingerprint"}


def modules() -> dict[str, Path]:
    """Module name to file, for all of src."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def num_lines(*parts: str) -> int:
    """Lines of Python in src, or of some of its files and folders."""
    files = [f for part in parts or (".",) for f in ([SRC / part] if part.endswith(".py") else (SRC / part).rglob("*.py"))]
    return sum(len(f.read_text().splitlines()) for f in files)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NOT_PRIVATE


def defined_names(tree: ast.AST) -> set[str]:
    """Private names that a module defines: functions, classes, variables, attributes that are assigned, and fields."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if is_private(name)}


def private_reaches() -> list[str]:
    """Uses of another module's private names: `from x import _y`, `module._y` and `object._attribute`."""
    trees = {name: ast.parse(path.read_text()) for name, path in modules().items()}
    defined = {name: defined_names(tree) for name, tree in trees.items()}
    ours = set().union(*defined.values())
    return [
        f"{modules()[name].relative_to(ROOT)}:{line}: {what}"
        for name, tree in trees.items()
        for line, what in sorted(_reaches(tree, defined[name], ours))
    ]


def _reaches(tree: ast.AST, own: set[str], ours: set[str]) -> Iterator[tuple[int, str]]:
    foreign = set()  # names of other packages' modules: torch._foreach_norm is no concern of ours
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {(a.asname or a.name).split(".")[0] for a in node.names if not a.name.startswith("seedbed")}
        elif isinstance(node, ast.ImportFrom):
            if not (node.module or "").startswith("seedbed"):
                foreign |= {a.asname or a.name for a in node.names}
                continue
            yield from ((node.lineno, f"import {a.name}") for a in node.names if is_private(a.name))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr in own or node.attr not in ours:
            continue
        root = node.value
        while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        name = root.id if isinstance(root, ast.Name) else ""
        if name not in foreign and not (name in ("self", "cls", "super") and isinstance(node.value, ast.Name | ast.Call)):
            yield node.lineno, ast.unparse(node)


def overridable_methods() -> list[str]:
    """The public methods of `System`."""
    tree = ast.parse((SRC / "train" / "system.py").read_text())
    (system,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "System")
    return [node.name for node in system.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


_LOADED = """
import json, sys
from seedbed.cli import main
status = main(sys.argv[1:])
files = sorted({m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "seedbed" and getattr(m, "__file__", None)})
print("\\nLOADED " + json.dumps(files))
sys.exit(status)
"""

_TOUCHED = """
import json, sys
from pathlib import Path
import seedbed
from seedbed.train import loop
ours = str(Path(seedbed.__file__).parent)
files, take, count = set(), loop.take_step, 0
def step(job):
    global count
    count += 1
    if count < 8:
        return take(job)
    sys.setprofile(lambda frame, event, arg: files.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        return take(job)
    finally:
        sys.setprofile(None)
loop.take_step = step
from seedbed.cli import main
status = main(sys.argv[1:])
print("\\nLOADED " + json.dumps(sorted(f for f in files if f.startswith(ours))))
sys.exit(status)
"""


# A small gpt/demo that does all that the whole one does: logs, evaluates late enough for every watcher, samples and saves.
_WHOLE = ("steps=210", "every.eval=200", "batch=4", "data.block=32", "model.depth=1", "model.width=32", "model.heads=2")


def train_demo(script: str, *settings: str, times: int = 1) -> list[list[Path]]:
    """Our files that `train gpt/demo --no-check` has loaded when it ends; with `_TOUCHED`, those that a step goes through.

    Of as many runs as `times` says: the first one prepares the data, those after it find it in the cache.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", script, "train", "gpt/demo", "--no-check", "device=cpu", *settings]
        env = {**os.environ, "PYTHONPATH": str(SRC.parent), "SEEDBED_CACHE": f"{folder}/cache"}
        for _ in range(times):
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
            (line,) = (line for line in done.stdout.splitlines() if line.startswith("LOADED "))
            found.append([Path(name) for name in json.loads(line.removeprefix("LOADED "))])
    return found


def files_loaded() -> tuple[list[Path], list[Path]]:
    """By a run that finds its data prepared, and by one that prepares it."""
    first, second = train_demo(_LOADED, *_WHOLE, times=2)
    return second, first


def files_in_a_step() -> tuple[list[Path], list[Path]]:
    """All that an eager step goes through; and without the model's own forward pass, which Python does not run where the step is
    compiled or captured."""
    (found,) = train_demo(_TOUCHED, "steps=12", "every.eval=0", "every.save=0", "every.sample=0")
    return found, [path for path in found if path.parent.name != "nn" and path.name != "model.py"]


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def main() -> None:
    reaches, (prepared, preparing), (touched, without_model) = private_reaches(), files_loaded(), files_in_a_step()
    print("\n".join(reaches))
    print(f"private reach-across: {len(reaches)}")
    print(f"methods of System: {len(overridable_methods())}")
    print(f"lines: src {num_lines():,}, core {num_lines(*CORE):,}")
    for loaded, when in ((prepared, "data prepared before"), (preparing, "data prepared by it")):
        print(f"loaded by `train gpt/demo --no-check`, {when}: {len(loaded)} modules, {lines_of(loaded):,} lines")
    print(f"files in a steady-state step, eager: {len(touched)}: {', '.join(path.stem for path in touched)}")
    print(f"files in a steady-state step, without the model's forward pass: {len(without_model)}")


if __name__ == "__main__":
    main()
